"""A GPU as CuPy and DALI show it, over host memory: queued work is done when somebody waits for it.

What is never waited for is never done, and memory that went back is overwritten: code that is wrong
about the order of streams gets wrong bytes, as it would on a card, only every time.
"""

import ctypes
import importlib.util
import sys
from types import SimpleNamespace

import numpy as np


class Stream:
    """Work in its order, begun when this stream or an event behind the work is waited for."""

    def __init__(self, card, ptr):
        self.ptr = ptr
        self._card = card
        self._queued = []
        self._done = 0

    def queue(self, work):
        """Have some work done once what was queued before is."""
        self._queued.append(work)

    def record(self, event):
        event.after = self, len(self._queued)
        return event

    def wait_event(self, event):
        stream, count = event.after
        self.queue(lambda: stream.run(count))

    def synchronize(self):
        self._card.waited_for.append(self)
        self.run(len(self._queued))

    def run(self, count):
        """Do the first so many pieces of work."""
        while self._done < count:
            work = self._queued[self._done]
            self._done += 1
            work()


class Memory:
    """Bytes from a pool, overwritten when they go back."""

    def __init__(self, host):
        self.host = host

    def __del__(self):
        self.host.fill(0xDD)


class Array:
    """As much of a CuPy array of bytes as is asked of one."""

    def __init__(self, memory, host):
        self._memory, self.host = memory, host

    def __len__(self):
        return len(self.host)

    def __getitem__(self, rows):
        return Array(self._memory, self.host[rows])

    @property
    def data(self):
        return Pointer(self.host)

    def set(self, array, stream):
        assert array.shape == self.host.shape
        host = self.host  # and not the memory, which may go back before
        stream.queue(lambda: np.copyto(host, array))


class Pointer:
    """An address, which keeps no memory here."""

    def __init__(self, host):
        self._host, self.ptr = host, host.ctypes.data

    def copy_from_device_async(self, source, nbytes, stream):
        to, memory = self._host, source._host
        stream.queue(lambda: np.copyto(to[:nbytes], memory[:nbytes]))


class Card:
    """A card: ``cupy`` is what is to be imported under that name."""

    def __init__(self):
        self.null = Stream(self, 0)
        self.streams = {0: self.null}
        self.waited_for = []
        self.waits_with_the_gil = 0
        cuda = SimpleNamespace(
            Stream=self._stream,
            Event=lambda disable_timing: SimpleNamespace(),
            get_current_stream=lambda: self.null,
        )
        self.cupy = SimpleNamespace(
            cuda=cuda,
            empty=self._empty,
            uint8=np.uint8,
            ndarray=Array,
            RawKernel=lambda source, name: None,  # compiled when it is launched
        )

    def images(self, arrays):
        """A batch of DALI's, which overwrites its memory when it goes."""
        return Images(self, arrays)

    def _stream(self, non_blocking):
        assert non_blocking, "it would wait for the default stream"
        stream = Stream(self, len(self.streams))
        self.streams[stream.ptr] = stream
        return stream

    def _empty(self, nbytes, dtype):
        host = np.zeros(nbytes, dtype)
        # As a pool gives it: whoever had it before has left work that still writes to it.
        self.null.queue(lambda: host.fill(0xEE))
        return Array(Memory(host), host)


class Images:
    """DALI's images in memory of the card: a list of several, or one (`shape` tells which)."""

    def __init__(self, card, arrays):
        self._card, self._arrays = card, [array.copy() for array in arrays]

    def __len__(self):
        return len(self._arrays)

    def __getitem__(self, at):
        return _Image(self, at)

    def shape(self):
        return [array.shape for array in self._arrays]

    def copy_to_external(self, ptr, cuda_stream, non_blocking, use_copy_kernel):
        copy_out(self._card, self._arrays, ptr, cuda_stream, non_blocking)

    def __del__(self):
        for array in self._arrays:
            array.fill(0xDD)


class _Image:
    def __init__(self, images, at):
        self._images, self._at = images, at

    def shape(self):
        return list(self._images.shape()[self._at])

    def copy_to_external(self, ptr, cuda_stream, non_blocking, use_copy_kernel):
        arrays = self._images._arrays[self._at : self._at + 1]
        copy_out(self._images._card, arrays, ptr, cuda_stream, non_blocking)


def copy_out(card, arrays, ptr, cuda_stream, non_blocking):
    """Queue a copy as DALI does, which holds the GIL where it waits for it."""
    stream = card.streams[cuda_stream.value or 0]

    def copy():
        start = ptr.value
        for array in arrays:
            ctypes.memmove(start, array.ctypes.data, array.nbytes)
            start += array.nbytes

    stream.queue(copy)
    if not non_blocking:
        card.waits_with_the_gil += 1
        stream.synchronize()


def loaded(module, monkeypatch, card):
    """A module of the package that has this card's CuPy, beside the one that others may use."""
    monkeypatch.setitem(sys.modules, "cupy", card.cupy)
    found = importlib.util.find_spec(module)
    spec = importlib.util.spec_from_file_location(f"{module}_on_a_played_card", found.origin)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
