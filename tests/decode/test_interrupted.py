"""Whatever ends a decode, wherever it comes: the next one neither hangs nor gets its images."""

import linecache
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from corpus import save
from PIL import Image
from processes import SECONDS

import dask_image_ingest
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Origin, decode
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.frames.pandas_backend import HostPixels, PandasBackend
from dask_image_ingest.frames.pixel_pool import pixel_memory

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

EDGE = 48
PACKAGE = str(Path(dask_image_ingest.__file__).parent)
INTERRUPTS = 15

# In a finalizer, an interrupt can only be shown.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def shine(images):
    from nvidia.dali import fn

    return fn.brightness(images, brightness=fn.random.uniform(range=(0.9, 1.1)))


OPTIONS = {
    "plain": DecodeSpec(),
    "resized": DecodeSpec(size=(16, 16)),
    "scaled": DecodeSpec(size=(16, 16), scaled=True),
    "transformed": DecodeSpec(size=(16, 16), transform=shine),
}


def jpeg(colour):
    return save(Image.new("RGB", (EDGE, EDGE), colour), "JPEG", quality=90)


def files(colour):
    """Images for DALI, for Pillow, for neither, and some that DALI gets and refuses."""
    image = Image.new("RGB", (EDGE, EDGE), colour)
    good, other = jpeg(colour), save(image, "BMP")
    at = good.rindex(b"\xff\xda") + 40
    refused = good[:at] + b"\xff\xc4\x00\x02" + good[at:]
    kinds = {5: other, 11: refused, 17: good[:100], 90: refused, 100: other}
    return [kinds.get(number, good) for number in range(130)]


def decoded(data, options):
    headers = [read_header(each, 1 << 22) for each in data]
    buffer = HostPixels(len(data) * EDGE * EDGE * 3)
    images = EncodedImages(headers, data.__getitem__, lambda row: Origin("", row, "it"))
    (pixels,) = decode(images, [options], [buffer])
    return pixels


def assert_same(pixels, want):
    assert pixels.errors == want.errors
    np.testing.assert_array_equal(pixels.shapes, want.shapes)
    np.testing.assert_array_equal(pixels.flat, want.flat)


class Trace:
    """Counts the lines of the package that this thread runs, and raises at one of them."""

    def __init__(self, raises_at=None, error=KeyboardInterrupt):
        self.lines = 0
        self._raises_at = raises_at
        self._error = error
        self._before = None

    def __enter__(self):
        self._before = sys.gettrace()  # what measures coverage, perhaps
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _called(self, frame, event, argument):
        return self._run if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _run(self, frame, event, argument):
        # To the line of a `with` Python comes back before it lets go, and lets no interrupt in.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.lines += 1
            if self.lines == self._raises_at:
                raise self._error(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._run


def in_another_thread(call):
    """What a call gives, unless it hangs."""
    given = []
    thread = threading.Thread(target=lambda: given.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the next decode hangs"
    return given[0]


@pytest.mark.newest
@pytest.mark.rounds(1, nightly=50)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_interrupt_anywhere_spoils_nothing_for_the_next(options, rng):
    options = OPTIONS[options]
    red, blue = files("red"), files("blue")
    want = decoded(blue, options)
    assert 0 < sum(error is not None for error in want.errors) < 4
    usual = np.median(want.flat.reshape(-1, 3), axis=0)
    assert usual.tolist() == pytest.approx([0, 0, 254], abs=30)
    with Trace() as whole:
        decoded(red, options)
    assert whole.lines > 1000
    kept = []
    for number in rng.sample(range(1, whole.lines), INTERRUPTS):
        error = random.Random(number).choice([KeyboardInterrupt, MemoryError])
        try:
            with Trace(number, error):
                decoded(red, options)
        except error as interrupt:
            # As a notebook does, with all frames and what is in them.
            kept.append(interrupt)
        assert_same(in_another_thread(lambda: decoded(blue, options)), want)
    assert len(kept) > INTERRUPTS // 2


@pytest.mark.parametrize("options", ["resized", "scaled", "transformed"])
def test_threads_that_share_decoders_get_their_own_images(options):
    options = OPTIONS[options]
    sets = {colour: files(colour) for colour in ("red", "blue")}
    want = {colour: decoded(data, options).flat.copy() for colour, data in sets.items()}
    got = []

    def work(colour):
        got.extend((colour, decoded(sets[colour], options).flat) for _ in range(4))

    threads = [threading.Thread(target=work, args=(colour,), daemon=True) for colour in [*sets] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(got) == 16
    for colour, flat in got:
        np.testing.assert_array_equal(flat, want[colour])


def test_memory_of_pixels_is_given_back_after_interrupts():
    pixel_memory.release()
    backend = PandasBackend()
    with Trace() as whole:
        array = backend.pixel_buffer(5_000_000).finish()
        del array
    for number in range(1, whole.lines + 1):
        try:
            with Trace(number):
                array = backend.pixel_buffer(5_000_000).finish()
                del array
        except KeyboardInterrupt:
            pass
    releaser = pixel_memory._releaser
    assert releaser is None or releaser.is_alive()
    pixel_memory.release()
    assert not pixel_memory.unused
