"""``write_hashes``: the hashes of rows that are kept, stored for later comparisons.

A folder of Arrow files, one for each call: key and hash of each row, 33 bytes and the key, and its
thumbnail, 1 kB, where there is one. Each has a checksum of all its bytes, and is read whole and
checked before any of it is used.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dask_image_ingest.arguments import (
    check_choice,
    check_flag,
    check_frame,
    check_storage_options,
    path_text,
    shown,
)
from dask_image_ingest.curate.fingerprints import KINDS, SIDE_OF_THUMBNAIL, Kind
from dask_image_ingest.curate.ranking import Keys, Ranked, rank_rows, resolve_identity
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.storage.output import HASHES_ADVICE, OutputStore, open_output

# Raise if hashes, or the columns, are no longer those of older files.
_VERSION = 3
_METADATA = b"dask_image_ingest.hashes"

_NAME = re.compile(r"[0-9]{6,}\.arrow")

_ROWS = 1 << 20  # of a record batch: its keys need offsets of 32 bits
_DIGEST = 16  # bytes of the checksum, which stands before the footer

_WORDS = {"bytes": 2, "pixels": 2, "pdq": 4}

_CURE = "delete it, and store its rows again with write_hashes()"


@dataclass(frozen=True)
class StoredHashes:
    """Hashes of a folder, in the order of its files: the fields of `Ranked` that a search needs."""

    keys: Keys
    hashes: np.ndarray = field(repr=False)  # uint64 (n, 1, words)
    is_exact: np.ndarray = field(repr=False)
    # As of `Ranked`: reads the files again
    thumbnails: Callable[[np.ndarray], np.ndarray] | None = field(default=None, repr=False)


def write_hashes(
    frame: Frame,
    path: str | os.PathLike[str],
    by: Kind = "pdq",
    *,
    identity: str | None = None,
    thumbnails: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Store the hashes of rows, with which later ones are compared.

    Computes at once: fingerprints that the frame lacks, then one file, which is added to those of
    earlier calls, whole or not at all. A row takes 33 bytes and its key, and 1 kB with a thumbnail.
    Those of earlier calls are checked before. If one of them has just these rows, none is added:
    after a kill, call it again.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe, as for
        :func:`~dask_image_ingest.curate.find_duplicates`: the rows that are kept.
    path
        A folder, local or remote. It is made if there is none.
    by
        The fingerprint to store: ``"bytes"``, ``"pixels"`` or ``"pdq"``. With ``"pdq"``, that of
        the pixels is stored instead for images with too little detail.
    identity
        A column of unique values whose text is stored instead of the key.
    thumbnails
        For ``"pdq"``: whether to store the thumbnails for a second look at later images, if the
        frame has ``fingerprint.thumbnail``, or has images and no ``fingerprint.pdq``. A file is
        made in memory, and so takes 3 kB a row there.
    storage_options
        For the file system of a remote folder.

    Raises
    ------
    ArgumentError
        If a column is missing; if a file of the folder is damaged, or has hashes of another kind or
        version.
    ExportError
        If the file can't be written.

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
    output = _open(path, "path", storage_options)
    stored = _checked(output, by)
    check_flag("thumbnails", thumbnails)
    id_columns = resolve_identity(frame, identity)
    ranked = rank_rows(frame, by, (), "first", id_columns, thumbnails and by == "pdq")
    try:
        while not _add(output, by, ranked, stored):
            stored = _checked(output, by)
    finally:
        output.remove_empty_staging()


def _checked(output: OutputStore, by: Kind) -> list[dict[str, Any]]:
    """Facts of the files of a folder; all are checked."""
    return [facts for facts, _ in _tables(output, by, "path")]


def _add(output: OutputStore, by: Kind, ranked: Ranked, stored: list[dict[str, Any]]) -> bool:
    """Write a file of the first free number; False if another call was faster."""
    taken = _numbers(output)
    if taken and not stored:
        return False
    schema = _schema(by, ranked.thumbnails is not None)
    batches = list(_batches(ranked, schema))
    digest = xxhash.xxh3_128()
    for batch in batches:
        digest.update(batch.serialize())
    rows = digest.hexdigest()
    number = next(number for number in itertools.count() if number not in taken)
    # A call that was killed at its end has left them. A gap is filled, with rows or none.
    if batches and number == len(taken) and any(facts.get("rows") == rows for facts in stored):
        return True
    facts = {"version": _VERSION, "by": by, "rows": rows}
    schema = schema.with_metadata({_METADATA: json.dumps(facts)})
    file = io.BytesIO()
    with pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content = file.getbuffer()
    end = _footer(content)
    # Readers of Arrow files skip what is between the last batch and the footer.
    signed = b"".join([content[:end], xxhash.xxh3_128_digest(content), content[end:]])
    is_new = output.create(_name(number), signed)
    if not is_new and number not in _numbers(output):
        raise ExportError(
            f"{output.locate(_name(number))} is there, and is no file: a folder, or a link to "
            "nothing. Remove it, and run it again"
        )
    return is_new


def _schema(by: Kind, with_thumbnails: bool = False) -> pa.Schema:
    hash_type = pa.binary(8 * _WORDS[by])
    fields = [("key", pa.string()), ("hash", hash_type), ("exact", pa.bool_())]
    thumbnail = [("thumbnail", pa.binary(SIDE_OF_THUMBNAIL**2))] if with_thumbnails else []
    return pa.schema(fields + thumbnail)


def _batches(ranked: Ranked, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(ranked.ids), _ROWS):
        rows = slice(start, start + _ROWS)
        hashes = np.ascontiguousarray(ranked.hashes[rows, 0])
        numbers = np.arange(start, start + len(hashes))
        fixed = [hashes] if ranked.thumbnails is None else [hashes, ranked.thumbnails(numbers)]
        hash_column, *thumbnails = (
            pa.Array.from_buffers(schema.field(name).type, len(numbers), [None, pa.py_buffer(of)])
            for name, of in zip(("hash", "thumbnail"), fixed, strict=False)
        )
        exact = pa.array(ranked.is_exact[rows])
        keys = ranked.keys.take(numbers)
        yield pa.record_batch([keys, hash_column, exact, *thumbnails], schema=schema)


def read_hashes(
    path: str | PathLike[str],
    by: Kind,
    argument: str,
    storage_options: dict[str, Any] | None = None,
) -> StoredHashes:
    """Hashes that `write_hashes` stored in a folder; an error if there are none."""
    output = _open(path, argument, storage_options)
    taken = _numbers(output)
    if not taken:
        raise ArgumentError(
            f"{argument}={shown(str(path))}: no folder of write_hashes(), which has files such as "
            "000000.arrow; pass one, or a frame"
        )
    if missing := set(range(max(taken))) - taken:
        raise ArgumentError(
            f"{argument}=: {output.locate(_name(min(missing)))} is missing, and later ones are "
            "there; store its rows again with write_hashes(), or none if they should go"
        )
    keys: list[pa.Array] = []
    hashes: list[np.ndarray] = []
    is_exact = [np.empty(0, bool)]
    has_thumbnails = False
    for _, table in _tables(output, by, argument):
        # Copies, so that the bytes of the files need not stay.
        empty = pa.array([], pa.string())
        keys += [pa.concat_arrays([empty, chunk]) for chunk in table["key"].chunks]
        has_thumbnails |= "thumbnail" in table.column_names
        is_exact += [chunk.to_numpy(zero_copy_only=False) for chunk in table["exact"].chunks]
        for chunk in table["hash"].chunks:
            words = np.frombuffer(chunk.buffers()[1], np.uint64).reshape(-1, 1, _WORDS[by])
            hashes.append(words[chunk.offset : chunk.offset + len(chunk)].copy())
    # Joined from the end, so that each part is free as soon as it is copied.
    stop = sum(map(len, hashes))
    joined = np.empty((stop, 1, _WORDS[by]), np.uint64)
    while hashes:
        part = hashes.pop()
        joined[stop - len(part) : stop] = part
        stop -= len(part)
    look_up = functools.partial(_stored_thumbnails, output, by, argument)
    return StoredHashes(
        Keys(pa.chunked_array(keys, pa.string())),
        joined,
        np.concatenate(is_exact),
        look_up if has_thumbnails else None,
    )


def _stored_thumbnails(
    output: OutputStore, by: Kind, argument: str, rows: np.ndarray
) -> np.ndarray:
    """Thumbnails of rows of a folder, uint8 (n, 32, 32), black where none was stored."""
    found = np.zeros((len(rows), SIDE_OF_THUMBNAIL, SIDE_OF_THUMBNAIL), np.uint8)
    start = 0
    for _, table in _tables(output, by, argument):
        here = np.flatnonzero((rows >= start) & (rows < start + len(table)))
        if "thumbnail" in table.column_names and len(here):
            taken = table["thumbnail"].take(pa.array(rows[here] - start)).to_pylist()
            found[here] = np.frombuffer(b"".join(taken), np.uint8).reshape(-1, *found.shape[1:])
        start += len(table)
    return found


def _open(
    path: str | PathLike[str], argument: str, storage_options: dict[str, Any] | None
) -> OutputStore:
    folder = path_text(argument, path)
    return open_output(folder, HASHES_ADVICE, check_storage_options(storage_options))


def _name(number: int) -> str:
    return f"{number:06d}.arrow"


def _numbers(output: OutputStore) -> set[int]:
    """The numbers of a folder's files."""
    return {int(name.partition(".")[0]) for name in output.sizes() if _NAME.fullmatch(name)}


def _tables(
    output: OutputStore, by: Kind, argument: str
) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Facts and rows of each file of a folder, in order.

    A file that is damaged, or of another kind or version, is an error.
    """
    for number in sorted(_numbers(output)):
        where = f"{argument}=: {output.locate(_name(number))}"
        try:
            facts, table = _verified(output.read(_name(number)) or b"")
            version, kind = facts["version"], facts["by"]
        except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ExportError):  # it can't be read
                raise
            raise ArgumentError(
                f"{where} is not a file of write_hashes(), or is damaged: {error}; {_CURE}"
            ) from error
        if (version, kind) != (_VERSION, by):
            raise ArgumentError(
                f"{where} has hashes of by={kind!r} in version {version}, not of by={by!r} in "
                f"version {_VERSION}; pass a folder of these, or store the rows again with "
                "write_hashes()"
            )
        has_thumbnails = "thumbnail" in table.column_names
        if not table.schema.equals(_schema(by, has_thumbnails)):
            raise ArgumentError(f"{where} has other columns than write_hashes() writes; {_CURE}")
        yield facts, table


def _verified(content: bytes) -> tuple[dict[str, Any], pa.Table]:
    """Facts and rows of a file, verified by its checksum."""
    end, view = _footer(content), memoryview(content)
    digest = xxhash.xxh3_128(view[: max(0, end - _DIGEST)])
    digest.update(view[max(0, end) :])
    if digest.digest() != content[max(0, end - _DIGEST) : max(0, end)]:
        raise ValueError("its checksum is not that of its bytes, or it is of an earlier release")
    table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
    table.validate(full=True)
    if any(column.null_count for column in table.drop_columns("key").columns):
        raise ValueError("it has rows without a hash")
    return json.loads(table.schema.metadata[_METADATA]), table


def _footer(content: bytes | memoryview) -> int:
    """Offset of an Arrow file's footer, by its last bytes: the length and a signature."""
    return len(content) - 10 - int.from_bytes(content[-10:-6], "little")
