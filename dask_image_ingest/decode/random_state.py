"""The states of DALI's random operators, by which an image's numbers are those of its sample."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import numpy as np

from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.errors import ArgumentError

# In DALI's counter, from an image to its neighbour in the batch (`kSkipaheadPerSample`).
_STRIDE = 65537

# Operators by which an image gets something of others, which are in its batch by chance.
_MIXING = frozenset(("BatchPermutation", "PermuteBatch"))


def take_over_random_numbers(made: Any, fn: Any, types: Any) -> list[str]:
    """Have the state of each random operator fed in; gives a name of each, which is its salt.

    Operators have an input for that, by which DALI's dynamic mode hands them its generators.
    """
    operators: dict[int, Any] = {}
    waiting = [made.source]
    while waiting:
        operator = waiting.pop()
        if operator is not None and operator.id not in operators:
            operators[operator.id] = operator
            waiting.extend(node.source for node in operator.inputs)
    seeds: list[str] = []
    unseeded = itertools.count()
    for _, operator in sorted(operators.items()):
        schema = operator._op.schema
        if schema.Name() in _MIXING:
            raise ArgumentError(
                f"transform= mixes the images of a batch ({schema.Name()}), and which images share "
                "a batch depends on the query: mix those of iter_batches() instead"
            )
        if not schema.HasRandomStateArg():
            continue
        state = fn.external_source(name=state_name(len(seeds)), dtype=types.UINT32, ndim=1)
        operator.spec.AddArgumentInput(
            "_random_state", state.name, state.ndim, state.dtype, state.layout
        )
        operator.inputs.append(state)
        # Operators that were given the same seed draw the same numbers, as they do in DALI; and the
        # others draw what they would without them.
        seed = operator._op._init_args.get("seed")
        own = seed is None or seed < 0
        seeds.append(f"operator {next(unseeded)}" if own else f"seed {seed}")
    return seeds


def state_name(number: int) -> str:
    """The input by which the state of a random operator is fed in."""
    return f"random-state-{number}"


def state_from(origin: Origin, seed: str) -> np.ndarray:
    """The state by which an operator draws for the samples from an origin on.

    It is one of DALI's Philox generator: key, counter and phase. The place of an image in its batch
    counts for the upper half of the counter.
    """
    shard = origin.shard.encode("utf-8", "surrogateescape")
    key = hashlib.blake2b(shard, digest_size=8, salt=_digest(seed)).digest()
    stream = origin.number * _STRIDE % 2**64
    return np.frombuffer(struct.pack("<8sQQI", key, 0, stream, 0), np.uint32)


def _digest(seed: str) -> bytes:
    return hashlib.blake2b(seed.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()
