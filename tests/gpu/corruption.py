"""Whether pixels are right while other work is queued on the GPU; it has not run on a GPU yet.

nvJPEG's hardware decoder writes when it is called, whatever its stream still waits for
(torchcodec#1634, on an H100). So a copy of a batch that has not begun, because work is queued
before it, could find the next batch's pixels in its place. A shard of baseline JPEG is read 20
times with 200 ms of work queued before each copy, on the default stream and on that of the copies,
and compared with a quiet read:

shipped   the copy as it is, for which the host waits before DALI's images go
queued    copies for which nobody waits before the last batch: to see whether the danger is real

each with DALI's default load of the hardware decoder and with none, in a process of its own. Exits
with 1 if the shipped way gave a wrong pixel, or could not be tried.
"""

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support")]

READS = 20
# More than a batch, so that one is decoded while the one before is copied.
IMAGES = 1200
BACKLOG = 0.2  # seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", type=float, help="share of images on the hardware decoder")
    parser.add_argument("--reads", type=int, default=READS, help=f"of each (default {READS})")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"in a read (default {IMAGES})")
    parser.add_argument("--copy", choices=["shipped", "queued"], help="one way alone")
    arguments = parser.parse_args()
    if arguments.copy:
        probe(arguments.load, arguments.copy, arguments.reads, arguments.images)
        return
    failed = False
    for load in ([], ["--load", "0"]):
        for copy in ("shipped", "queued"):
            command = [sys.executable, __file__, *load, "--copy", copy]
            command += ["--reads", str(arguments.reads), "--images", str(arguments.images)]
            status = subprocess.run(command, check=False).returncode
            failed |= copy == "shipped" and status != 0
    sys.exit(failed)


def probe(load, copy, reads, images):
    """Say how many of the reads under load differ from a quiet one."""
    from synthetic import write_shards

    with tempfile.TemporaryDirectory() as folder:
        (path,) = write_shards(Path(folder), 1, images, distinct=16)
        with hardware_load(load):
            quiet = pixels(path)
            with copied(copy), backlog():
                wrong = 0
                for number in range(1, reads + 1):
                    is_wrong = not (pixels(path) == quiet).all()
                    wrong += is_wrong
                    # At once, for whoever is cut off.
                    print(f"read {number}: {'WRONG' if is_wrong else 'right'}", flush=True)
    label = "DALI's own" if load is None else load
    print(f"hardware load {label}, copy {copy}: {wrong} of {reads} reads wrong", flush=True)
    sys.exit(wrong > 0)


def pixels(path):
    """The pixels of a shard, on the host."""
    import numpy as np
    from gpu_probes import compute

    import dask_image_ingest as dii

    arrays = compute(dii.read_webdataset_images(path, backend="cudf")).images.arrays()
    return np.concatenate([array.get().reshape(-1) for array in arrays])


@contextlib.contextmanager
def hardware_load(load):
    """Decode with this share of the images on the hardware decoder."""
    from nvidia.dali import fn

    decode = fn.decoders.image
    changed = decode if load is None else functools.partial(decode, hw_decoder_load=load)
    with mock.patch.object(fn.decoders, "image", changed):
        yield


@contextlib.contextmanager
def backlog():
    """Queue work before each copy out of DALI's memory, on both streams that there are."""
    import cupy
    from gpu_probes import queue_work

    from dask_image_ingest.frames.cudf.pixels import DevicePixels

    append = DevicePixels.append

    def append_late(self, images):
        queue_work(cupy.cuda.Stream.null, BACKLOG)
        queue_work(self._stream, BACKLOG)
        append(self, images)

    with mock.patch.object(DevicePixels, "append", append_late):
        yield


@contextlib.contextmanager
def copied(how):
    """Have the host wait for the copies of each batch, or for all of them at the end."""
    from dask_image_ingest.frames.cudf.pixels import DevicePixels

    append, finish = DevicePixels.append, DevicePixels.finish

    def append_without_waiting(self, images):
        with mock.patch.object(DevicePixels, "_wait"):
            append(self, images)

    def finish_late(self):
        self._wait()
        return finish(self)

    if how == "shipped":
        yield
        return
    with mock.patch.multiple(DevicePixels, append=append_without_waiting, finish=finish_late):
        yield


if __name__ == "__main__":
    main()
