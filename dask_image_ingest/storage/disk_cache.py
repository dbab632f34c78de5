"""Temporary file for bytes that exceed a memory limit."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import dask


class SpillFile:
    """An unnamed temporary file, created on first write."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0

    def write(self, data: bytes | bytearray) -> int:
        """Append ``data`` and return its offset.

        Raises
        ------
        OSError
            If the disk is full.
        """
        if self._file is None:
            folder = dask.config.get("temporary-directory", None)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        start = self._end
        if not data.lstrip(b"\0"):
            # A hole takes no space: files that decompress to huge sizes are mostly zeros.
            self._end += len(data)
            os.ftruncate(self._file.fileno(), self._end)
            return start
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file.fileno(), view, self._end)
            view = view[written:]
            self._end += written
        return start

    def read(self, start: int, size: int) -> bytes:
        """Read bytes that were written."""
        parts = []
        while size > 0 and (part := os.pread(self._file.fileno(), size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()
