"""What libtiff says of an image, caught: by default it writes that to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from PIL import _imaging

__all__ = ["libtiff_messages"]

_LONGEST = 300

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)

_thread = threading.local()


@contextlib.contextmanager
def libtiff_messages() -> Iterator[list[str]]:
    """Catch the messages of this thread; those of others are written as ever."""
    _install()
    outer = getattr(_thread, "messages", None)
    _thread.messages = []
    try:
        yield _thread.messages
    finally:
        _thread.messages = outer


@functools.cache
def _install() -> None:
    """Set the handlers of Pillow's libtiff, once in a process; of one without it, nothing."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(_imaging.__file__)
        for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
            set_handler = getattr(library, name)
            set_handler.argtypes, set_handler.restype = [_Handler], ctypes.c_void_p
            set_handler(_handler)


def _handle(module: bytes | None, format: bytes, arguments: Any) -> None:
    buffer = ctypes.create_string_buffer(_LONGEST)
    _libc.vsnprintf(buffer, ctypes.c_size_t(_LONGEST), format, ctypes.c_void_p(arguments))
    message = buffer.value.decode(errors="replace")
    if module:
        message = f"{module.decode(errors='replace')}: {message}"
    messages = getattr(_thread, "messages", None)
    if messages is None:
        sys.stderr.write(f"{message}\n")
    else:
        messages.append(message)


_libc = ctypes.CDLL(None)
_handler = _Handler(_handle)
