"""States of DALI's random operators, computed from the sample: see `Transform`."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import numpy as np

from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.url_secrets import url_identity

# Distance in DALI's counter between neighbours in a batch (`kSkipaheadPerSample`).
_STRIDE = 65537

# Operators that mix the images of a batch, whose content depends on the query.
_MIXING = frozenset(("BatchPermutation", "PermuteBatch"))


def add_state_inputs(output: Any, fn: Any, types: Any) -> list[str]:
    """Give each random operator of a graph an external source for its state (`state_name`).

    It uses the argument by which DALI's dynamic mode passes its generators to operators.

    Returns
    -------
    list of str
        Seed of each random operator, for `first_state`.
    """
    operators: dict[int, Any] = {}
    stack = [output.source]
    while stack:
        operator = stack.pop()
        if operator is not None and operator.id not in operators:
            operators[operator.id] = operator
            stack.extend(node.source for node in operator.inputs)
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
        # As in DALI, operators with the same explicit seed draw the same numbers. Unseeded ones are
        # numbered on their own, so that a seeded operator does not change what they draw.
        seed = operator._op._init_args.get("seed")
        is_unseeded = seed is None or seed < 0
        seeds.append(f"operator {next(unseeded)}" if is_unseeded else f"seed {seed}")
    return seeds


def state_name(number: int) -> str:
    """Name of the external source with the state of a random operator."""
    return f"random-state-{number}"


def first_state(origin: Origin, seed: str) -> np.ndarray:
    """State of an operator for a batch of consecutive samples, the first of which is ``origin``.

    uint32 array of a Philox generator's key, counter and phase. DALI adds an image's position in
    the batch, times `_STRIDE`, to the upper half of the counter.
    """
    shard = url_identity(origin.shard).encode("utf-8", "surrogateescape")
    key = hashlib.blake2b(shard, digest_size=8, salt=_digest(seed)).digest()
    stream = origin.number * _STRIDE % 2**64
    return np.frombuffer(struct.pack("<8sQQI", key, 0, stream, 0), np.uint32)


def _digest(seed: str) -> bytes:
    return hashlib.blake2b(seed.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()
