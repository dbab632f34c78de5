"""A temporary file for bytes that memory has no room for."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import dask


class SpillFile:
    """A temporary file without a name, made when it is first written to."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0

    def write(self, data: bytes | bytearray) -> int:
        """Append, and say where it begins.

        Raises
        ------
        OSError
            If there is no room for it.
        """
        if self._file is None:
            folder = dask.config.get("temporary-directory", None)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        start = self._end
        if not data.lstrip(b"\0"):
            # A hole takes no room: what claims to be large is mostly zeros.
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
        """Read what was written."""
        parts = []
        while size > 0 and (part := os.pread(self._file.fileno(), size, start)):
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()
