"""A JPEG of any coding → a baseline one with the same coefficients, by libjpeg-turbo's transform.

No Python package that is maintained has this and brings its library along, so that the library's
own function is called here: ``tj3Transform`` of release 3, and ``tjTransform`` of release 2.
(Release 3 has that too, but it loses EXIF in 2.1.92.) It does not look at how large the
coefficients are: of those that baseline has no code for, as a damaged arithmetic stream gives them
without a warning, it makes a broken JPEG. So it is shown them before, row by row of blocks.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_short, c_size_t, c_ulong, c_void_p
from typing import Any

import numpy as np

from dask_image_ingest.errors import MissingDependencyError

_NAME = "libturbojpeg.so.0"

# Stop at a warning, since what follows one is invented; and after so many scans, which no picture
# has.
_SCANS = 500
_FLAGS_2 = 8192 | 32768
_PARAMETERS_3 = {0: 1, 13: _SCANS}
_TRANSFORM_3 = 2

# Baseline has codes for differences of 11 bits between constant terms, and for 10 bits of others
# (ITU-T T.81, tables F.1 and F.2).
_LEAST = np.array([-1024] + [-1023] * 63, np.int16)
_MOST = np.full(64, 1023, np.int16)


class BaselineError(Exception):
    """A JPEG whose coefficients cannot be read; what libjpeg says of it."""


class _Region(ctypes.Structure):
    """``tjregion``."""

    _fields_ = (("x", c_int), ("y", c_int), ("width", c_int), ("height", c_int))


# Of a row of blocks: its coefficients, its own region and that of all, and what it belongs to.
_FILTER = CFUNCTYPE(c_int, POINTER(c_short), _Region, _Region, c_int, c_int, c_void_p)


class _Transform(ctypes.Structure):
    """``tjtransform``: with nothing but zeros, a copy in baseline coding."""

    _fields_ = (
        ("region", _Region),
        ("operation", c_int),
        ("options", c_int),
        ("data", c_void_p),
        ("filter", _FILTER),
    )


class _Coefficients:
    """Check that baseline JPEG has codes for the coefficients of an image."""

    def __init__(self) -> None:
        self.have_codes = True
        self.filter = _FILTER(self._look)

    def _look(self, coefficients: Any, row: _Region, *_: Any) -> int:
        blocks = np.ctypeslib.as_array(coefficients, (row.width * row.height // 64, 64))
        self.have_codes &= bool(((blocks >= _LEAST) & (blocks <= _MOST)).all())
        return 0 if self.have_codes else -1


class TurboJpeg:
    """The library, of release 2 or 3."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._is_3 = hasattr(library, "tj3Transform")
        names = ("3Init", "3Transform", "3GetErrorStr", "3Free", "3Destroy")
        if not self._is_3:
            names = ("InitTransform", "Transform", "GetErrorStr2", "Free", "Destroy")
        found = [getattr(library, f"tj{name}") for name in names]
        self._init, self._transform, self._error, self._free, self._destroy = found
        size = c_size_t if self._is_3 else c_ulong
        self._size = size
        pointers = [c_void_p, c_char_p, size, c_int, POINTER(c_void_p), POINTER(size)]
        self._transform.argtypes = [*pointers, POINTER(_Transform), *[c_int] * (not self._is_3)]
        self._init.argtypes = [c_int] * self._is_3
        self._init.restype = c_void_p
        self._error.restype = c_char_p
        self._free.restype = None
        for function in (self._error, self._free, self._destroy):
            function.argtypes = [c_void_p]
        if self._is_3:
            self._set = library.tj3Set
            self._set.argtypes = [c_void_p, c_int, c_int]

    def transform(self, jpeg: bytes) -> bytes:
        """Copy a JPEG, in baseline coding."""
        handle = self._init(_TRANSFORM_3) if self._is_3 else self._init()
        if not handle:
            raise MemoryError("libturbojpeg has no memory for a transform")
        target, size = c_void_p(), self._size()
        shown = _Coefficients()
        how = _Transform(filter=shown.filter)
        given = [handle, jpeg, len(jpeg), 1, byref(target), byref(size), byref(how)]
        try:
            if self._is_3:
                for parameter, value in _PARAMETERS_3.items():
                    self._set(handle, parameter, value)
            else:
                given.append(_FLAGS_2)
            failed = self._transform(*given)
            if not shown.have_codes:
                raise BaselineError("it has coefficients that are larger than any of a picture")
            if failed or not target.value:
                said = (self._error(handle) or b"").decode(errors="replace")
                raise BaselineError(said.rpartition("(): ")[2])
            return ctypes.string_at(target.value, size.value)
        finally:
            self._free(target)
            self._destroy(handle)


def to_baseline(jpeg: bytes) -> bytes:
    """The same picture in baseline coding: the same coefficients, tables, EXIF, profile, comments.

    Raises
    ------
    BaselineError
        If it is damaged in any way, or has no coefficients of 8 bits.
    """
    return require_turbojpeg().transform(jpeg)


@functools.cache
def require_turbojpeg() -> TurboJpeg:
    """The TurboJPEG library: of the environment, of the system, or of the package ``turbojpeg``.

    Raises
    ------
    MissingDependencyError
        If there is none.
    """
    for path in _candidates():
        try:
            return TurboJpeg(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
    raise MissingDependencyError(
        "jpeg='baseline' needs libjpeg-turbo's TurboJPEG library, which is not installed: pip "
        "install 'dask-image-ingest[jpeg]', conda install libjpeg-turbo, or apt install "
        "libturbojpeg0"
    )


def _candidates() -> Iterator[str]:
    yield os.path.join(sys.prefix, "lib", _NAME)
    yield _NAME
    try:
        files = importlib.metadata.files("turbojpeg") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name.startswith("libturbojpeg"):
            yield str(file.locate())
