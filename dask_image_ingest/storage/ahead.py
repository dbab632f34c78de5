"""A range of a local shard, read by other threads into one buffer before it is looked at."""

from __future__ import annotations

import os
from concurrent.futures import Future, wait
from typing import Any

from dask_image_ingest.storage.remote.threads import request_threads

__all__ = ["ReadAhead"]

# Bytes that are read by one call: enough that calls cost nothing, few enough to begin at once.
_PIECE = 8 << 20
_THREADS = 2


class ReadAhead:
    """Bytes from ``start`` on, as many as ``buffer`` has.

    What can't be read is not there, and an error for whoever reads it by themselves.
    """

    def __init__(self, number: int, start: int, buffer: memoryview) -> None:
        self.start, self.stop = start, start + len(buffer)
        self._number = number
        self._buffer = buffer
        self._shown = buffer.toreadonly()
        self._ready = start
        threads = request_threads(_THREADS)
        self._pieces: list[Future[bool]] = [
            threads.submit(self._read, at) for at in range(0, len(buffer), _PIECE)
        ]

    def part(self, start: int, stop: int) -> memoryview | None:
        """The bytes of a range, once they have been read; None if they are not among these."""
        if start < self.start or stop > self.stop or (stop > self._ready and not self._wait(stop)):
            return None
        return self._shown[start - self.start : stop - self.start]

    @property
    def ready(self) -> memoryview:
        """What has been read of it, as far as anybody has asked."""
        return self._shown[: self._ready - self.start]

    def close(self) -> None:
        """Let no thread read any more."""
        wait([piece for piece in self._pieces if not piece.cancel()])

    def _wait(self, stop: int) -> bool:
        while self._ready < stop:
            at = self._ready - self.start
            number = at // _PIECE
            if self._pieces[number].cancel():
                # Where all threads are busy, whoever waits reads it.
                done: Future[bool] = Future()
                done.set_result(self._read(number * _PIECE))
                self._pieces[number] = done
            if not self._pieces[number].result():
                return False
            self._ready = min(self.start + (number + 1) * _PIECE, self.stop)
        return True

    def _read(self, at: int) -> bool:
        room: Any = self._buffer[at : at + _PIECE]
        try:
            while len(room):
                count = os.preadv(self._number, [room], self.start + at)
                if not count:
                    return False
                room, at = room[count:], at + count
        except OSError:
            return False
        return True
