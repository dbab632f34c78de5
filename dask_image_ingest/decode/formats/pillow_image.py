"""Open images with Pillow, without its process-wide settings and warnings."""

from __future__ import annotations

import functools
import io
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Final

from PIL import Image, ImageFile

from dask_image_ingest.decode.formats.stored import BadImage, StoredHeader, read_orientation
from dask_image_ingest.storage import LazyBytes, ReaderFile

_PLUGINS: Final = {
    "jp2": "JPEG2000",
    "j2k": "JPEG2000",
    "pnm": "PPM",
}


def open_image(file: IO[bytes], format: str) -> ImageFile.ImageFile:
    """Read the header of ``file``, which is of ``format``; nothing is decoded.

    Not with `PIL.Image.open`, which tries other formats too, and warns of large images or refuses
    them by a process-wide setting.

    Raises
    ------
    BadImage
    """
    plugin = _plugins().get(_PLUGINS.get(format, format.upper()))
    if plugin is None:
        raise BadImage("unsupported-format", f"{format} is a format that Pillow does not read here")
    with pillow_errors():
        try:
            return plugin(file, "")
        except SyntaxError as error:
            if format == "tiff" and str(error) in _NO_MODE:
                raise NoColours from None
            raise


# Pillow's errors for a TIFF for which it has no mode.
_NO_MODE: Final = ("unknown pixel mode", "unknown data organization", "string index out of range")


class NoColours(BadImage):
    """Error of a TIFF whose samples can't be shown; they may still be read as raw."""

    def __init__(self) -> None:
        super().__init__("unsupported-format", "samples that are no colours: read mode='raw'")


def read_header_with_pillow(data: LazyBytes, format: str) -> StoredHeader:
    """Read the header of an image of any format that has no reader here.

    Raises
    ------
    BadImage
    """
    with open_image(_as_file(data), format) as image, pillow_errors():
        (width, height), channels = image.size, len(image.getbands())
        exif = image.info.get("exif")
    if not width or not height:
        raise BadImage("corrupt", f"its size is {width} x {height}")
    orientation = read_orientation(exif, 0, len(exif))[0] if isinstance(exif, bytes) else 1
    return StoredHeader(height, width, channels, orientation, True, None)


# Formats with animations, of which each frame can be decoded.
_ANIMATED: Final = ("gif", "png", "webp")


def count_frames(data: LazyBytes, format: str) -> int:
    """Number of frames of an animation, as it says; 1 for others. Nothing is decoded."""
    if format not in _ANIMATED:
        return 1
    with open_image(_as_file(data), format) as image, pillow_errors():
        return int(getattr(image, "n_frames", 1))


def seek_frame(image: ImageFile.ImageFile, frame: int) -> None:
    """Go on to a frame of an animation; a GIF's may be larger than the first, and is refused."""
    size = image.size
    for number in range(image.tell() + 1, frame + 1):
        image.seek(number)
        if image.size != size:
            raise BadImage("corrupt", f"its frame {number} is larger than the first")


def _as_file(data: LazyBytes) -> IO[bytes]:
    return io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(ReaderFile(data))


@contextmanager
def pillow_errors() -> Iterator[None]:
    """Turn exceptions of Pillow into `BadImage`; silence warnings."""
    with _silence:
        try:
            yield
        except BadImage:
            raise
        except Image.DecompressionBombError as error:
            # Pillow checks TIFF tiles, WebP and GIF frames against its own limit.
            raise BadImage("too-large", error) from None
        except (struct.error, IndexError):
            raise BadImage("corrupt", "a part of it is shorter than it should be") from None
        except Exception as error:
            # Plugins raise all kinds: OSError, SyntaxError, ValueError, OverflowError, MemoryError,
            # zlib.error, ...
            message = str(error) or type(error).__name__
            code = "truncated" if "truncated" in message.lower() else "corrupt"
            raise BadImage(code, message) from None


class _Silence:
    """Context manager that silences Pillow's warnings; reentrant and thread-safe.

    `warnings.catch_warnings` replaces process-wide filters, so threads that overlap would restore
    each other's. Here only the first to enter and the last to leave touch them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0  # number of threads
        self._catch = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._catch = warnings.catch_warnings()
                self._catch.__enter__()
                # Only Pillow's, as other threads run other code.
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._catch.__exit__(None, None, None)

    def begin_in_fork(self) -> None:
        """Release what threads of the parent held; they do not exist in the fork."""
        self._lock = threading.Lock()
        if self._inside:
            self._inside = 0
            self._catch.__exit__(None, None, None)


_silence = _Silence()
os.register_at_fork(after_in_child=_silence.begin_in_fork)


@functools.cache
def _plugins() -> dict[str, Callable[[IO[bytes], str | bytes], ImageFile.ImageFile]]:
    Image.init()
    from PIL.JpegImagePlugin import JpegImageFile

    # The factory that Pillow registers for JPEG first searches for further images (MPO).
    return {name: factory for name, (factory, _) in Image.OPEN.items()} | {"JPEG": JpegImageFile}
