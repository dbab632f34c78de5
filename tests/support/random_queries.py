"""Random queries of a lazy read, each compared with the same over partitions in memory.

A query is Python text, so a failure prints what reproduces it. By hand:

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
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe.dask_expr import _expr as dx
from dask.dataframe.dask_expr import new_collection
from query_answers import SIZE, Source, difference, outcome, sources

import dask_image_ingest as dii

Step = Callable[["Query"], "str | None"]
STEPS: list[Step] = []
ENDS: list[Step] = []
WEIGHTS: dict[Step, float] = {}


class Difference(Exception):
    """Two answers to one query."""


def step(weight: float = 1, portable: bool = False) -> Callable[[Step], Step]:
    """Register what makes another frame or series; ``portable`` text means the same in pandas."""
    return _register(STEPS, weight, portable)


def end(weight: float = 1, portable: bool = False) -> Callable[[Step], Step]:
    """Register what asks for an answer."""
    return _register(ENDS, weight, portable)


def _register(steps: list[Step], weight: float, portable: bool) -> Callable[[Step], Step]:
    def register(function: Step) -> Step:
        steps.append(function)
        WEIGHTS[function] = weight
        if portable:
            PORTABLE.add(function)
        return function

    return register


PORTABLE: set[Step] = set()


def first_two(part: Any) -> Any:
    return part.iloc[:2]


def rows(part: Any) -> pd.Series:
    return pd.Series([len(part)])


def brightness(images: Any) -> list[float]:
    return [float(np.asarray(image).mean()) for image in images]


def map_batches(frame: Any) -> Any:
    return frame.images.map_batches(brightness, {"light": "float32"}, batch_size=3)


def compute(value: Any) -> Any:
    return value.compute() if hasattr(value, "compute") else value


def compute_both(first: Any, second: Any) -> Any:
    return dask.compute(first, second)


def layout(value: Any) -> Any:
    """How many partitions, how long, and between which divisions, when all is optimised."""
    optimized = value.optimize()
    return optimized.npartitions, optimized.divisions, value.map_partitions(len).compute()


def by_partition(value: Any) -> Any:
    return list(dask.compute(*value.to_delayed()))


def each_partition(value: Any) -> Any:
    return [value.partitions[n].compute() for n in range(value.npartitions)]


def unfused(value: Any) -> Any:
    return value.optimize(fuse=False).compute()


HELPERS = {
    function.__name__: function
    for function in (
        first_two, rows, map_batches, compute, compute_both, layout, by_partition, each_partition,
        unfused,
    )
} | {"dd": dd, "pd": pd, "np": np, "dask": dask}  # fmt: skip


def eager_decode(frame: Any, **options: Any) -> Any:
    return dii.decode_images(frame, size=SIZE, **options)


def eager_map(frame: Any) -> Any:
    return frame.images.map_batches(brightness, {"light": "float32"}, batch_size=3)


class EachPartition(dx.Blockwise):
    """A function of every partition, which takes up nothing."""

    _parameters: ClassVar = ["frame", "function", "options"]

    @staticmethod
    def operation(frame: Any, function: Callable, options: dict) -> Any:
        return function(frame, **options)


class EachRow(EachPartition, dx.Elemwise):
    """A function that makes as many rows as there are."""


def plain_decode(frame: Any, **options: Any) -> Any:
    kind = EachPartition if options.get("errors") == "drop" else EachRow
    return new_collection(kind(frame.expr, eager_decode, options))


def plain_map(frame: Any) -> Any:
    return new_collection(EachRow(frame.expr, eager_map, {}))


def namespaces(source: Source) -> tuple[dict, dict, dict]:
    """What the names in a query stand for: lazily read, in memory with dask, and with pandas."""
    lazy = {**HELPERS, "d": source.lazy, "decode_images": eager_decode}
    plain = {**HELPERS, "d": source.plain, "decode_images": plain_decode, "map_batches": plain_map}
    whole = {**HELPERS, "d": source.whole, "decode_images": eager_decode}
    return lazy, plain, whole


KINDS = {
    "int": ("int32[pyarrow]", "int64[pyarrow]"),
    "float": ("float[pyarrow]", "double[pyarrow]", "float32", "float64"),
    "text": ("string",),
    "bool": ("bool[pyarrow]", "boolean", "bool"),
    "image": ("image",),
}
NUMBERS = ("int", "float")
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass
class Query:
    """A query in the making: lines of text, and what they made so far."""

    rng: random.Random
    source: Source
    lines: list[str] = field(default_factory=list)
    used: Counter = field(default_factory=Counter)
    portable: set[str] = field(default_factory=lambda: {"d"})

    def __post_init__(self) -> None:
        self.lazy, self.plain, self.whole = namespaces(self.source)
        self.names = ["d"]

    def text(self) -> str:
        """The query as one can run it, after the imports."""
        return "\n".join(self.lines)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, ndim: int) -> str | None:
        """A name that was made, rather a late one."""
        fitting = [n for n in self.names if getattr(self.plain[n], "ndim", 0) == ndim]
        if not fitting:
            return None
        return fitting[-1] if self.chance(0.6) else self.rng.choice(fitting)

    def frame(self) -> str:
        return self.pick(2) or "d"

    def columns(self, name: str, *kinds: str) -> list[str]:
        """The columns of a frame, of some kinds."""
        dtypes = self.plain[name]._meta.dtypes
        wanted = {dtype for kind in kinds for dtype in KINDS[kind]}
        return [c for c, dtype in dtypes.items() if not kinds or str(dtype) in wanted]

    def column(self, name: str, *kinds: str) -> str | None:
        found = self.columns(name, *kinds)
        return self.rng.choice(found) if found else None

    def constant(self, column: str) -> Any:
        """What a column can be compared with."""
        by_name = {
            "width": [0, 12, 13, 20, 31], "height": [8, 16, 20, 24], "cls": [0, 1, 2, 3],
            "offset": [512, 3000, 8000], "nbytes": [300, 700, 1500], "channels": [1, 3],
            "score": [-1.5, 0.25, 0.5, 0.6], "txt": ["cat", "dog", "", "b"], "name": ["x", "y"],
            "format": ["jpeg", "png"], "error": ["missing", "truncated"], "flag": [True, False],
            "__key__": ["0003", "0010", "0015"], "light": [100.0, 128.0],
        }  # fmt: skip
        for name, found in by_name.items():
            if name in column:
                return self.rng.choice(found)
        return None

    def leaf(self, name: str) -> str | None:
        """One condition on a frame."""
        column = self.column(name)
        if column is None:
            return None
        this = f"{name}[{column!r}]"
        null = self.rng.choice([f"{this}.isna()", f"{this}.notnull()"])
        constant = self.constant(column)
        if constant is None or self.chance(0.15):
            return null
        compared = f"{this} {self.rng.choice(COMPARISONS)} {constant!r}"
        if self.chance(0.6):
            return compared
        if column in self.columns(name, "text"):
            return self.rng.choice(
                [
                    f"{this}.isin([{constant!r}, 'zz'])",
                    f"{this}.str.contains('a', na=False)",
                    f"({this}.str.len() > 2)",
                ]
            )
        if column in self.columns(name, *NUMBERS):
            other = self.column(name, *NUMBERS)
            return self.rng.choice(
                [
                    f"{this}.isin([{constant!r}])",
                    f"({this} * 2 > {constant!r})",
                    f"({this} <= {name}[{other!r}])",
                    f"({this} > {this}.mean())",
                    f"({constant!r} < {this})",
                ]
            )
        return compared

    def predicate(self, name: str, depth: int = 2) -> str | None:
        """Conditions on a frame, joined."""
        if depth == 0 or self.chance(0.5):
            leaf = self.leaf(name)
            return f"({leaf})" if leaf else None
        left, right = self.predicate(name, depth - 1), self.predicate(name, depth - 1)
        if left is None or right is None:
            return None
        return self.rng.choice([f"({left} & {right})", f"({left} | {right})", f"~{left}"])

    def number(self, name: str) -> str | None:
        """A computed column of a frame."""
        column = self.column(name, *NUMBERS)
        if column is None:
            return None
        other = self.column(name, *NUMBERS)
        this = f"{name}[{column!r}]"
        return self.rng.choice([f"{this} + {name}[{other!r}]", f"{this} * 2", f"{this}.fillna(0)"])

    def say(self, text: str) -> bool:
        """Run a line over both; False where the query makes no sense."""
        try:
            exec(text, self.plain)
        except Exception:
            return False
        self.lines.append(text)
        try:
            exec(text, self.lazy)
        except Exception as error:
            raise Difference(f"raises {type(error).__name__}: {error}") from error
        return True

    def grow(self, function: Step) -> bool:
        """Add a step, where it is of use."""
        expression = function(self)
        if expression is None:
            return False
        name = f"v{len(self.names)}"
        several = expression.startswith("*")
        text = f"{name}, {name}b = {expression[1:]}" if several else f"{name} = {expression}"
        if not self.say(text):
            return False
        used = {known for known in self.names if f"{known}" in _words(expression)}
        for made in (name, f"{name}b") if several else (name,):
            self.names.append(made)
            if function in PORTABLE and used <= self.portable:
                self.portable.add(made)
        self.used[function.__name__] += 1
        return True

    def finish(self, function: Step) -> bool:
        """Ask, and compare the answers; False where the query makes no sense."""
        expression = function(self)
        if expression is None:
            return False
        want, error = outcome(lambda: eval(expression, self.plain))
        if error is not None:
            return False
        self.lines.append(expression)
        got, error = outcome(lambda: eval(expression, self.lazy))
        if error is not None:
            raise Difference(f"raises {type(error).__name__}: {error}") from error
        compare(got, want, "partitions in memory")
        used = {known for known in self.names if known in _words(expression)}
        self.used[function.__name__] += 1
        if function in PORTABLE and used <= self.portable:
            for line in self.lines[:-1]:
                if line.split(" = ")[0] in self.portable:
                    exec(line, self.whole)
            in_pandas, error = outcome(lambda: eval(expression, self.whole))
            if error is None:
                compare(got, in_pandas, "pandas")
                self.used["as pandas"] += 1
        return True


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())


def compare(got: Any, want: Any, witness: str) -> None:
    """Raise where two answers differ."""
    if got != want:
        place, got, want = difference(got, want)
        raise Difference(f"got{place} {got!r:.500}\n  {witness}: {want!r:.500}")


# What makes another frame or series.


@step(6, portable=True)
def filter_of_itself(q: Query) -> str | None:
    a = q.frame()
    predicate = q.predicate(a)
    return predicate and f"{a}[{predicate}]"


@step(3)
def filter_by_another(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    predicate = q.predicate(b)
    return predicate and f"{a}[{predicate}]"


@step(4, portable=True)
def projection(q: Query) -> str | None:
    a = q.frame()
    columns = q.columns(a)
    kept = q.rng.sample(columns, q.rng.randint(1, len(columns)))
    return f"{a}[{kept!r}]"


@step(1, portable=True)
def without_pixels(q: Query) -> str | None:
    a = q.frame()
    made = [c for c in ("image", "error") if c in q.columns(a)]
    return f"{a}.drop(columns={made!r})" if made else None


@step(2, portable=True)
def one_column(q: Query) -> str | None:
    a = q.frame()
    return f"{a}[{q.column(a)!r}]"


@step(2, portable=True)
def rename(q: Query) -> str | None:
    a = q.frame()
    old = q.column(a)
    return f"{a}.rename(columns={{{old!r}: {old + '_new'!r}}})"


@step(3, portable=True)
def assign(q: Query) -> str | None:
    a = q.frame()
    number = q.number(a)
    return number and f"{a}.assign(n={number})"


@step(2)
def assign_of_another(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    column = q.column(b)
    return f"{a}.assign(other={b}[{column!r}])"


@step(2)
def assign_of_a_filter(q: Query) -> str | None:
    a = q.frame()
    predicate, column = q.predicate(a, 1), q.column(a)
    return predicate and f"{a}.assign(other={a}[{predicate}][{column!r}])"


@step(2)
def sum_of_two(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    left, right = q.column(a, "int"), q.column(b, "int")
    if left is None or right is None:
        return None
    operator = q.rng.choice(["+", "-", "<", "=="])
    return f"{a}[{left!r}] {operator} {b}[{right!r}]"


@step(1)
def combine_first(q: Query) -> str | None:
    a, b = q.frame(), q.frame()
    left, right = q.column(a, "int"), q.column(b, "int")
    return left and right and f"{a}[{left!r}].combine_first({b}[{right!r}])"


@step(2)
def head(q: Query) -> str | None:
    a = q.pick(q.rng.choice([1, 2, 2])) or q.frame()
    n = q.rng.choice([0, 1, 2, 3, 5, 7, 40, -1, -2])
    partitions = q.rng.choice([1, 1, 2, -1])
    return f"{a}.head({n}, npartitions={partitions}, compute=False)"


@step(1)
def tail(q: Query) -> str | None:
    a = q.pick(q.rng.choice([1, 2, 2])) or q.frame()
    return f"{a}.tail({q.rng.choice([0, 1, 2, 3, 7, 40])}, compute=False)"


@step(3)
def some_partitions(q: Query) -> str | None:
    a = q.pick(q.rng.choice([1, 2, 2])) or q.frame()
    n = q.plain[a].npartitions
    start, stop = sorted(q.rng.sample(range(n + 1), 2))
    chosen = [q.rng.randrange(n) for _ in range(q.rng.randint(1, 3))]
    return f"{a}.partitions[{q.rng.choice([f'{start}:{stop}', f'{start}', repr(chosen)])}]"


@step(1)
def loc(q: Query) -> str | None:
    a = q.frame()
    predicate, columns = q.predicate(a, 1), q.columns(a)
    some = q.rng.sample(columns, q.rng.randint(1, len(columns)))
    return f"{a}.loc[" + q.rng.choice(["1:3", "2:", "[1, 2]", f":, {some!r}", f"{predicate}"]) + "]"


@step(2)
def concat(q: Query) -> str | None:
    return f"dd.concat([{q.frame()}, {q.frame()}])"


@step(1)
def concat_with_itself(q: Query) -> str | None:
    a = q.frame()
    return f"dd.concat([{a}, {a}, d])"


@step(1)
def merge(q: Query) -> str | None:
    if any("merge" in line for line in q.lines):
        return None
    a, b = q.frame(), q.frame()
    keys = [c for c in ("__key__", "cls") if c in q.columns(a) and c in q.columns(b)]
    if not keys:
        return None
    key = q.rng.choice(keys)
    others = [c for c in q.columns(b) if c != key]
    some = [key, *q.rng.sample(others, min(len(others), q.rng.randint(0, 3)))]
    how = q.rng.choice(["inner", "left", "outer"])
    return f"{a}.merge({b}[{some!r}], on={key!r}, how={how!r})"


@step(3, portable=True)
def late_decode(q: Query) -> str | None:
    a = q.frame()
    if not {"__url__", "offset", "nbytes"}.issubset(q.columns(a)):
        return None
    return f"decode_images({a}{q.rng.choice(['', '', ', errors=' + repr('drop')])})"


@step(2, portable=True)
def map_over_batches(q: Query) -> str | None:
    a = q.frame()
    return f"map_batches({a})" if len(q.columns(a, "image")) == 1 else None


@step(1)
def cumulated(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}[{column!r}].cumsum()"


@step(1)
def sample(q: Query) -> str | None:
    return f"{q.frame()}.sample(frac={q.rng.choice([0.3, 0.5])}, random_state=1)"


@step(1)
def per_partition(q: Query) -> str | None:
    return f"{q.frame()}.map_partitions({q.rng.choice(['first_two', 'rows'])})"


@step(1)
def repartition(q: Query) -> str | None:
    return f"{q.frame()}.repartition(npartitions={q.rng.choice([1, 2, 3, 8])})"


@step(1)
def persist(q: Query) -> str | None:
    return f"{q.pick(q.rng.choice([1, 2, 2])) or q.frame()}.persist()"


@step(1)
def persist_two(q: Query) -> str | None:
    return f"*dask.persist({q.frame()}, {q.frame()})"


@step(0.5)
def optimized(q: Query) -> str | None:
    return f"{q.frame()}.optimize()"


@step(0.5)
def by_group(q: Query) -> str | None:
    a = q.frame()
    key, number = q.column(a, "int", "text"), q.column(a, "int")
    if key is None or number is None or key == number:
        return None
    how = q.rng.choice(["sum", "max", "count"])
    return f"{a}.groupby({key!r}, dropna=False)[{number!r}].{how}().to_frame()"


@step(0.5)
def distinct(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text")
    return key and f"{a}.drop_duplicates(subset=[{key!r}])"


@step(0.5, portable=True)
def without_nulls(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "float", "image")
    return key and f"{a}.dropna(subset=[{key!r}])"


@step(0.5)
def shifted(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int", "text")
    return column and f"{a}[{column!r}].shift(1)"


@step(0.3)
def in_order(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}.sort_values({column!r})"


@step(0.3)
def by_index(q: Query) -> str | None:
    a = q.frame()
    return f"{a}.set_index('offset')" if "offset" in q.columns(a) else None


@step(0.3)
def shuffled(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    return column and f"{a}.shuffle({column!r})"


# What asks for an answer.


@end(8, portable=True)
def all_of_it(q: Query) -> str | None:
    return f"compute({q.names[-1]})"


@end(2, portable=True)
def length(q: Query) -> str | None:
    return f"len({q.names[-1]})"


@end(1, portable=True)
def labels(q: Query) -> str | None:
    return f"compute({q.names[-1]}.index)"


@end(2)
def partition_lengths(q: Query) -> str | None:
    return f"layout({q.names[-1]})"


@end(1)
def each(q: Query) -> str | None:
    return f"{q.rng.choice(['by_partition', 'each_partition', 'unfused'])}({q.names[-1]})"


@end(0.5)
def without_index(q: Query) -> str | None:
    # An end, since dask moves filters that follow below it, where they find other labels.
    return f"compute({q.names[-1]}.reset_index({q.rng.choice(['', 'drop=True'])}))"


@end(2)
def two_at_once(q: Query) -> str | None:
    return f"compute_both({q.names[-1]}, {q.rng.choice(q.names)})"


@end(2)
def two_columns_at_once(q: Query) -> str | None:
    a = q.frame()
    return f"compute_both({a}[{q.column(a)!r}], {a}[{q.column(a)!r}])"


@end(2)
def first_rows(q: Query) -> str | None:
    n, partitions = q.rng.choice([1, 3, 7]), q.rng.choice([1, -1])
    return f"{q.names[-1]}.head({n}, npartitions={partitions})"


@end(1)
def last_rows(q: Query) -> str | None:
    return f"{q.names[-1]}.tail({q.rng.choice([1, 3, 20])})"


@end(1)
def as_array(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, *NUMBERS)
    return column and f"{a}[[{column!r}]].to_dask_array(lengths=True).compute()"


@end(3, portable=True)
def reduction(q: Query) -> str | None:
    a = q.frame()
    column = q.column(a, "int")
    how = q.rng.choice(["sum", "min", "max", "count", "nunique"])
    return column and f"compute({a}[{column!r}].{how}())"


@end(2)
def group(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "bool")
    return key and f"compute({a}.groupby({key!r}).size())"


@end(1)
def counts(q: Query) -> str | None:
    a = q.frame()
    key = q.column(a, "int", "text", "bool")
    return key and f"compute({a}[{key!r}].value_counts(dropna=False))"


def ask(source: Source, seed: int) -> tuple[Query, str | None]:
    """One random query; gives what differs, None where nothing does."""
    q = Query(random.Random(seed), source)
    tries = 0
    try:
        wanted = q.rng.choice([1, 2, 2, 3, 3, 4, 5])
        while len(q.lines) < wanted and tries < 30:
            tries += 1
            q.grow(_choice(q.rng, STEPS))
        tries = 0
        while tries < 10 and not q.finish(_choice(q.rng, ENDS)):
            tries += 1
        if tries == 10:
            q.used["nothing was answered"] += 1
    except Difference as difference:
        return q, str(difference)
    return q, None


def _choice(rng: random.Random, steps: list[Step]) -> Step:
    return rng.choices(steps, [WEIGHTS[function] for function in steps])[0]


@contextmanager
def quiet() -> Any:
    """No lines about bad images, no warnings of dask and pandas about what is asked on purpose."""
    logger = logging.getLogger("dask_image_ingest")
    level = logger.level
    logger.setLevel(logging.ERROR)
    options = {"scheduler": "sync", "dataframe.shuffle.method": "tasks"}
    try:
        with dask.config.set(options), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run(
    made: Mapping[str, Source], seeds: Iterable[int], report: Callable[[str], None]
) -> tuple[int, Counter]:
    """Ask a query for each seed; gives how many differ, and what was asked."""
    names = list(made)
    used: Counter = Counter()
    failures = 0
    with quiet():
        for seed in seeds:
            name = names[seed % len(names)]
            query, difference = ask(made[name], seed)
            used.update(query.used)
            if difference is not None:
                failures += 1
                report(f"# seed {seed}, {name!r}\n{query.text()}\n{difference}\n")
    return failures, used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queries", type=int, default=20_000, help="how many (20000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first query (0)")
    parser.add_argument("--most", type=int, default=10, help="stop after so many differences (10)")
    args = parser.parse_args()
    started = time.monotonic()
    used: Counter = Counter()
    failures = done = 0
    with tempfile.TemporaryDirectory() as folder:
        made = sources(Path(folder))
        last = args.seed + args.queries
        for start in range(args.seed, last, 100):
            stop = min(start + 100, last)
            failed, asked = run(made, range(start, stop), print)
            failures, done, used = failures + failed, done + stop - start, used + asked
            if failures >= args.most:
                break
    print(f"seeds {args.seed} to {args.seed + done - 1}: {done:,} queries, {failures} differences")
    print(f"{time.monotonic() - started:.0f} s; asked: {dict(used.most_common())}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
