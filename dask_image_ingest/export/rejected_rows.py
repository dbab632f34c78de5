"""Rows that can't be exported, with reasons; found before the first byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dask_image_ingest.decode import printable
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.manifest import Options
from dask_image_ingest.frames import with_urls
from dask_image_ingest.url_secrets import url_identity

# Rows that messages name as examples.
_NAMED = 3

# A key that every reader reads back: parts between slashes, the last one without a dot.
_GOOD_KEY = r"^([^/\\[:cntrl:]]+/)*[^/.\\[:cntrl:]]+$"
_BAD_PART = r"(^|/)(\.\.|__[^/]*__)(/|$)"


_BAD_KEY = (
    "bad-key: readers would change or skip it, or it is unsafe to unpack: a key has parts between "
    "slashes, none of them empty, '..' or __like_this__, the last without a dot, and no backslash "
    "or control character"
)

_AMBIGUOUS = (
    "no-pointer: it has no offset, and keys of the frame are not those of the shards, so that "
    "nothing says which sample it is; give new keys to rows with an offset alone"
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
            self._add_all(pc.is_null(self._rows.column(name)), f"no-pointer: its {column} is null")

    def find_bad_keys(self) -> None:
        """Reject rows whose key readers would not read back, or that leads out of its folder."""
        keys = self._rows.column("key")
        good = pc.match_substring_regex(keys, _GOOD_KEY)
        self._add_all(pc.or_(pc.invert(good), pc.match_substring_regex(keys, _BAD_PART)), _BAD_KEY)

    def find_ambiguous_rows(self) -> None:
        """Reject rows identified only by their key, if keys of the frame have changed."""
        self._add_all(pc.is_null(self._rows.column("offset")), _AMBIGUOUS)

    def find_bad_images(self) -> None:
        """Reject rows whose images could not be decoded."""
        for row, error in enumerate(self._rows.column("error").to_pylist()):
            if error is not None:
                self.add(row, f"bad-image: {error}")

    def find_repeated_rows(
        self, rows: np.ndarray, sources: np.ndarray, samples: pa.ChunkedArray
    ) -> None:
        """Reject rows whose sample an earlier row has, given the source and sample of each row."""
        is_located = np.isin(rows, self.kept) & pc.is_valid(samples).to_numpy()
        numbers = pc.fill_null(samples, 0).to_numpy()
        order = np.lexsort([rows, numbers, sources])[: len(rows)]
        order = order[is_located[order]]
        same = (np.diff(numbers[order]) == 0) & (np.diff(sources[order]) == 0)
        for row in rows[order[1:][same]]:
            self.add(row, "repeated-row: the frame has this sample more than once")

    def _add_all(self, mask: pa.ChunkedArray, reason: str) -> None:
        """Reject the rows for which a mask is true; null counts as false."""
        for row in np.flatnonzero(pc.fill_null(mask, False).to_numpy()):
            self.add(row, reason)

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
            f"{more}. Nothing was written. "
            f"{'No shard of the frame can be read' if nothing_read else drop}"
        )


def _place(row: Mapping[str, Any]) -> str:
    """Location of a sample, for a message; empty for an image that is in no shard."""
    if not row["__url__"]:
        return ""
    # Without an offset, of a sample without an image, the key alone says which it is.
    at = "" if row["offset"] is None else f", byte {row['offset']}"
    return f" of {row['__url__']}{at}"
