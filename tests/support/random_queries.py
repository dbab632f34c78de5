"""Random queries of a lazy read, each compared with the same over partitions in memory.

A query is Python text, so a difference prints what reproduces it. By hand:

    python tests/support/random_queries.py --queries 20000 --seed 1
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import dask
from dask.dataframe.dask_expr._quantiles import RepartitionQuantiles
from query_sources import Source, sources
from query_steps import ENDS, STEPS, Step, add, finish
from query_text import Difference, Query

# Steps and ends that are tried before a query is given up.
TRIES = 30


def ask(source: Source, seed: int) -> tuple[Query, str | None]:
    """One random query, and where its answers differ, None where they do not."""
    query = Query(random.Random(seed), source)
    wanted = query.rng.choice([1, 2, 2, 3, 3, 4, 5])
    try:
        for _ in range(TRIES):
            if len(query.lines) < wanted:
                add(query, choose(query.rng, STEPS))
        if not any(finish(query, choose(query.rng, ENDS)) for _ in range(TRIES)):
            query.asked["nothing"] += 1
    except Difference as difference:
        return query, str(difference)
    return query, None


def choose(rng: random.Random, steps: list[Step]) -> Step:
    return rng.choices(steps, [each.weight for each in steps])[0]


@contextmanager
def quiet() -> Iterator[None]:
    """No lines about bad images, no warnings about what is asked on purpose; the same divisions.

    Dask samples the values by which it cuts sorted partitions, and its seed is the frame's name.
    """
    logger = logging.getLogger("dask_image_ingest")
    level = logger.level
    logger.setLevel(logging.ERROR)
    options = {"scheduler": "sync", "dataframe.shuffle.method": "tasks"}
    try:
        with (
            dask.config.set(options),
            mock.patch.dict(RepartitionQuantiles._defaults, random_state=0),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run(
    made: Mapping[str, Source], seeds: Iterable[int], report: Callable[[str], None]
) -> tuple[int, Counter]:
    """Ask a query for each seed; gives how many differ, and what was asked."""
    names = list(made)
    asked: Counter = Counter()
    differences = 0
    for seed in seeds:
        name = names[seed % len(names)]
        query, difference = ask(made[name], seed)
        asked.update(query.asked)
        if difference is not None:
            differences += 1
            report(f"# seed {seed}, {name!r}\n" + "\n".join(query.lines) + f"\n{difference}\n")
    return differences, asked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queries", type=int, default=20_000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first query (0)")
    parser.add_argument("--most", type=int, default=10, help="stop after so many differences (10)")
    args = parser.parse_args()
    started, last = time.monotonic(), args.seed + args.queries
    asked: Counter = Counter()
    differences = seed = 0
    with tempfile.TemporaryDirectory() as folder, quiet():
        made = sources(Path(folder))
        for seed in range(args.seed, last):
            more, some = run(made, [seed], lambda text: print(text, flush=True))
            differences, asked = differences + more, asked + some
            if differences == args.most:
                break
            if (seed - args.seed) % 1000 == 999:
                print(f"# {seed - args.seed + 1:,} queries", flush=True)
    done = seed - args.seed + 1
    print(f"seeds {args.seed} to {seed}: {done:,} queries, {differences} differences")
    print(f"{time.monotonic() - started:.0f} s; asked: {dict(asked.most_common())}")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
