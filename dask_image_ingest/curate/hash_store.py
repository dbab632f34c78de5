"""``write_hashes``: the hashes of rows that are kept, stored for later comparisons.

A folder of Arrow files, one for each call: key and hash of each row, 33 bytes and the key. Files
are mapped into memory, so that hashes are read as they are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import check_choice, check_frame, shown
from dask_image_ingest.curate.fingerprints import KINDS, Kind
from dask_image_ingest.curate.ranking import Keys, Ranked, rank_rows, resolve_identity
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError

# Raise if hashes, or the columns, are no longer those of older files.
_VERSION = 1
_METADATA = b"dask_image_ingest.hashes"

_ROWS = 1 << 20  # of a record batch: its keys need offsets of 32 bits

_WORDS = {"bytes": 2, "pixels": 2, "pdq": 4}


@dataclass(frozen=True)
class StoredHashes:
    """Hashes of a folder, in the order of its files: the fields of `Ranked` that a search needs."""

    keys: Keys
    hashes: np.ndarray = field(repr=False)  # uint64 (n, 1, words)
    is_exact: np.ndarray = field(repr=False)


def write_hashes(
    frame: Frame,
    path: str | os.PathLike[str],
    by: Kind = "pdq",
    *,
    identity: str | None = None,
) -> None:
    """Store the hashes of rows, with which later ones are compared.

    Computes at once: fingerprints that the frame lacks, then one file, which is added to those of
    earlier calls. A row takes 33 bytes and its key.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe, as for
        :func:`~dask_image_ingest.curate.find_duplicates`: the rows that are kept.
    path
        A local folder. It is made if there is none.
    by
        The fingerprint to store: ``"bytes"``, ``"pixels"`` or ``"pdq"``. With ``"pdq"``, that of
        the pixels is stored instead for images with too little detail.
    identity
        A column of unique values whose text is stored instead of the key.

    Raises
    ------
    ArgumentError
        If a column is missing, and if the folder has hashes of another kind or version.

    Examples
    --------
    >>> found = curate.find_duplicates(ddf)
    >>> curate.write_hashes(found[found["duplicate.keep"]], "hashes")
    >>> again = curate.find_duplicates(ddf, against="hashes")
    >>> len(again), len(again[again["duplicate.keep"]])  # one is damaged, and has no hash
    (52, 1)
    """
    check_choice("by", by, KINDS)
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    folder = Path(os.fspath(path))
    if _files(folder):
        read_hashes(folder, by, "path")
    ranked = rank_rows(frame, by, (), (), resolve_identity(frame, identity))
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(file.stem) for file in _files(folder)), default=-1) + 1
    file = folder / f"{number:06d}.arrow"
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    metadata = {_METADATA: json.dumps({"version": _VERSION, "by": by})}
    schema = pa.schema(
        [("key", pa.string()), ("hash", pa.binary(8 * _WORDS[by])), ("exact", pa.bool_())],
        metadata,
    )
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _batches(ranked, schema):
                writer.write_batch(batch)
        # Fails if another process has added a file of this number meanwhile.
        os.link(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def _batches(ranked: Ranked, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(ranked.ids), _ROWS):
        rows = slice(start, start + _ROWS)
        hashes = np.ascontiguousarray(ranked.hashes[rows, 0])
        hash_type = schema.field("hash").type
        hash_column = pa.Array.from_buffers(hash_type, len(hashes), [None, pa.py_buffer(hashes)])
        keys = ranked.keys.take(np.arange(start, start + len(hashes)))
        exact = pa.array(ranked.is_exact[rows])
        yield pa.record_batch([keys, hash_column, exact], schema=schema)


def read_hashes(path: Any, by: Kind, argument: str) -> StoredHashes:
    """Hashes that `write_hashes` stored in a folder.

    Raises
    ------
    ArgumentError
        If there are none, or they are of another kind or version.
    """
    folder = Path(os.fspath(path))
    files = _files(folder)
    if not files:
        raise ArgumentError(
            f"{argument}={shown(str(path))}: no folder of write_hashes(), which has files such as "
            "000000.arrow; pass one, or a frame"
        )
    keys, hashes, is_exact = [], [], []
    for file in files:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
            stored = json.loads((table.schema.metadata or {})[_METADATA])
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise ArgumentError(
                f"{argument}={shown(str(path))}: {file.name} is not a file of write_hashes(): "
                f"{error}; delete it, and store its rows again"
            ) from error
        if stored != {"version": _VERSION, "by": by}:
            raise ArgumentError(
                f"{argument}={shown(str(path))}: {file.name} has hashes of by={stored.get('by')!r} "
                f"in version {stored.get('version')}, not of by={by!r} in version {_VERSION}; pass "
                "a folder of these, or store the rows again with write_hashes()"
            )
        keys += table["key"].chunks
        for chunk in table["hash"].chunks:
            words = np.frombuffer(chunk.buffers()[1], np.uint64)
            words = words.reshape(-1, _WORDS[by])[chunk.offset : chunk.offset + len(chunk)]
            hashes.append(words)
        is_exact += [chunk.to_numpy(zero_copy_only=False) for chunk in table["exact"].chunks]
    if len(hashes) != 1:
        hashes = [np.concatenate([np.empty((0, _WORDS[by]), np.uint64), *hashes])]
    return StoredHashes(
        Keys(pa.chunked_array(keys, pa.string())),
        hashes[0][:, None],
        np.concatenate([np.empty(0, bool), *is_exact]),
    )


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.arrow") if file.stem.isdigit())
