"""Rows that can't be exported, with reasons; found before the first byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.decode import printable
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.export_options import Options
from dask_image_ingest.frames import with_urls
from dask_image_ingest.storage import local_path
from dask_image_ingest.url_secrets import url_identity

# Rows that messages name as examples.
_NAMED = 3

# A key that every reader reads back: parts between slashes, the last one without a dot.
_GOOD_KEY = r"^([^/\\[:cntrl:]]+/)*[^/.\\[:cntrl:]]+$"
_BAD_PART = r"(^|/)(\.\.|__[^/]*__)(/|$)"


_AMBIGUOUS = (
    "no-pointer: it has no offset (its sample has no image, a sparse one, or a member twice), and "
    "keys of the frame are not those of the shards, so that nothing says which sample it is; give "
    "new keys to rows with an offset alone, or export these rows with the keys that they had"
)


class RefusedRowsError(ArgumentError):
    """Rows are rejected, and the export raises; the command line's exit status for bad data."""


class RejectedRows:
    """Rows of a frame (``key``, ``url``, ``offset``) that are not exported, each with a reason."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self._reasons: dict[int, str] = {}

    @property
    def kept(self) -> np.ndarray:
        """The rows that are not rejected, in order."""
        kept = np.ones(len(self._rows), bool)
        kept[list(self._reasons)] = False
        return np.flatnonzero(kept)

    def add(self, row: int, reason: str) -> None:
        """Reject a row. A reason begins with a code: ``bad-key: it has an empty part``."""
        self._reasons.setdefault(int(row), reason)

    def find_bad_locations(self) -> None:
        """Reject rows without a key or shard."""
        for name, column in (("key", "__key__"), ("url", "__url__")):
            for row in _where(pc.is_null(self._rows.column(name))):
                self.add(row, f"no-pointer: its {column} is null")

    def find_bad_keys(self) -> None:
        """Reject rows whose key readers would not read back, or that leads out of its folder."""
        keys = self._rows.column("key")
        good = pc.and_(
            pc.match_substring_regex(keys, _GOOD_KEY),
            pc.invert(pc.match_substring_regex(keys, _BAD_PART)),
        )
        for row in _where(pc.equal(good, pa.scalar(False))):
            self.add(row, f"bad-key: {_key_problem(keys[row].as_py())}")

    def find_ambiguous_rows(self) -> None:
        """Reject rows identified only by their key, if keys of the frame have changed."""
        for row in _where(pc.is_null(self._rows.column("offset"))):
            self.add(row, _AMBIGUOUS)

    def find_bad_images(self) -> None:
        """Reject rows whose images could not be decoded."""
        errors = self._rows.column("error")
        for row in _where(pc.is_valid(errors)):
            self.add(row, f"bad-image: {errors[row].as_py()}")

    def find_repeated_rows(self, sources: np.ndarray) -> None:
        """Reject rows with the offset and key of an earlier row.

        Hard links give samples of other keys the same offset.
        """
        offsets, rows = self._offsets()
        repeats = self._repeats(rows, [offsets[rows], sources[rows]])
        if len(repeats):
            rows = rows[np.isin(offsets[rows], offsets[repeats])]
            self._add_repeated(rows, [self._codes("key", rows), offsets[rows], sources[rows]])

    def find_repeated_renamed(self, sources: np.ndarray, renamed: Sequence[int]) -> None:
        """Reject rows with the offset of an earlier row in sources where keys were renamed."""
        offsets, rows = self._offsets()
        rows = rows[np.isin(sources[rows], renamed)]
        self._add_repeated(rows, [offsets[rows], sources[rows]])

    def find_repeated_keys(self, sources: np.ndarray) -> None:
        """Reject rows without an offset that have the key of an earlier such row."""
        kept = self.kept
        rows = kept[pc.is_null(self._rows.column("offset")).to_numpy()[kept]]
        self._add_repeated(rows, [self._codes("key", rows), sources[rows]])

    def table(self) -> pa.Table:
        """The rejected rows: ``__key__``, ``__url__``, ``offset`` and ``reason``."""
        return self._table(sorted(self._reasons))

    def _table(self, rows: Sequence[int]) -> pa.Table:
        table = self._rows.select(["key", "url", "offset"]).take(pa.array(rows, pa.int64()))
        table = table.set_column(1, "url", table.column("url").cast(pa.string()))
        reasons = pa.array([self._reasons[row] for row in rows], pa.string())
        table = table.rename_columns(["__key__", "__url__", "offset"])
        return with_urls(table.append_column("reason", reasons), url_identity)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Reason code → ``count`` of rows, ``first`` keys, and ``detail`` of the first reason."""
        summary: dict[str, dict[str, Any]] = {}
        for row in self.table().to_pylist():
            code, _, detail = row["reason"].partition(": ")
            entry = summary.setdefault(code, {"count": 0, "first": [], "detail": detail})
            entry["count"] += 1
            if len(entry["first"]) < _NAMED:
                entry["first"].append(printable(str(row["__key__"])))
        return dict(sorted(summary.items(), key=lambda item: -item[1]["count"]))

    def refuse(self, options: Options, nothing_read: bool) -> None:
        """Raise if ``options`` refuse a row, or none can be read, naming the first ones."""
        refused = [
            row
            for row, reason in sorted(self._reasons.items())
            if nothing_read or options.refuses(reason)
        ]
        if not refused:
            return
        table = self._table(refused)
        named = [
            f"{printable(str(row['__key__']))}{_place(row)}: {row['reason']}"
            for row in table[:_NAMED].to_pylist()
        ]
        more = f" ... and {len(table) - _NAMED:,} more" if len(table) > _NAMED else ""
        drop = "Filter them out, or pass row_errors='drop' to leave them out and list them"
        if options.errors == "raise":
            drop = f"{drop}, for bad images errors='drop'"
        raise RefusedRowsError(
            f"{len(table):,} of {len(self._rows):,} rows cannot be exported: {'; '.join(named)}"
            f"{more}. Nothing was written. {self._options_for_remote_shards()}"
            f"{'No shard of the frame can be read' if nothing_read else drop}"
        )

    def _options_for_remote_shards(self) -> str:
        """Hint at ``source_options=`` if an unreadable shard is remote."""
        urls = (
            self._rows.column("url")[row].as_py()
            for row, reason in self._reasons.items()
            if reason.startswith("unreadable-shard")
        )
        if all(local_path(url) is not None for url in islice(urls, _NAMED)):
            return ""
        return (
            "If its file system needs options, pass them as source_options=: a frame that is "
            "computed or persisted has lost the storage_options= of its read. "
        )

    def _offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each row, and the kept rows that have one."""
        offsets = pc.fill_null(self._rows.column("offset"), -1).to_numpy()
        kept = self.kept
        return offsets, kept[offsets[kept] >= 0]

    def _codes(self, column: str, rows: np.ndarray) -> np.ndarray:
        """A number for each distinct value of a column in some rows."""
        values = self._rows.column(column).take(pa.array(rows)).combine_chunks()
        return values.dictionary_encode().indices.to_numpy()

    def _add_repeated(self, rows: np.ndarray, by: Sequence[np.ndarray]) -> None:
        for row in self._repeats(rows, by):
            self.add(row, "repeated-row: the frame has this sample more than once")

    def _repeats(self, rows: np.ndarray, by: Sequence[np.ndarray]) -> np.ndarray:
        """The rows that equal an earlier row in all arrays ``by``."""
        if len(rows) < 2:
            return rows[:0]
        order = np.lexsort([rows, *by])
        same = np.ones(len(rows) - 1, bool)
        for column in by:
            same &= column[order[1:]] == column[order[:-1]]
        return rows[order[1:][same]]


def _where(mask: pa.ChunkedArray) -> list[int]:
    """The rows for which a mask is true; null counts as false."""
    return np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False)).tolist()


def _key_problem(key: str) -> str:
    """Describe what is wrong with a key."""
    parts = key.split("/")
    if not key or "" in parts[1:]:
        return "it has an empty part"
    if not parts[0]:
        return "it begins with a slash, and would be written anywhere"
    if ".." in parts:
        return "it leads out of its folder with '..'"
    if "\\" in key:
        return "it has a backslash, which some systems take for a slash"
    if "." in parts[-1]:
        return "readers take all after the first dot of its last part for an extension"
    if any(part.startswith("__") and part.endswith("__") for part in parts):
        return "readers skip names __like_this__"
    return "it has control characters"


def _place(row: Mapping[str, Any]) -> str:
    """Location of a sample, for a message; empty for an image that is in no shard."""
    if not row["__url__"]:
        return ""
    # Without an offset, of a sample without an image, the key alone says which it is.
    at = "" if row["offset"] is None else f", byte {row['offset']}"
    return f" of {row['__url__']}{at}"
