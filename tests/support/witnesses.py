"""What others read in shards, and make of pixels: webdataset, tarfile, GNU tar, DALI, Pillow."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_iterator

from dask_image_ingest.decode.region import Region

# Key → extension → bytes, in the order of the shard.
Samples = list[tuple[str, dict[str, bytes]]]


def shards_in(folder) -> list[Path]:
    return sorted(Path(folder).glob("*.tar"))


def by_webdataset(paths) -> Samples:
    """As webdataset gives them; it raises where a sample has a member twice."""
    samples = []
    for path in paths:
        members = tar_file_iterator(io.BytesIO(Path(path).read_bytes()))
        for sample in group_by_keys({**member, "__url__": ""} for member in members):
            samples.append((sample.pop("__key__"), sample))
            sample.pop("__url__")
    return samples


def by_tarfile(paths) -> list[tuple[str, bytes]]:
    """Names and contents, with nothing said of owners and times."""
    found = []
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                assert (member.uid, member.gid, member.mtime, member.mode) == (0, 0, 0, 0o644)
                assert (member.uname, member.gname, member.type) == ("", "", tarfile.REGTYPE)
                found.append((member.name, tar.extractfile(member).read()))
    return found


def by_gnu_tar(paths, folder: Path) -> dict[str, bytes]:
    """Files, unpacked one shard after the other."""
    found = {}
    for number, path in enumerate(paths):
        target = folder / f"unpacked-{number}"
        target.mkdir()
        finished = subprocess.run(
            ["tar", "-xf", path, "-C", target],
            capture_output=True,
            text=True,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stderr == ""
        found |= {
            f"{number}:{file.relative_to(target)}": file.read_bytes()
            for file in target.rglob("*")
            if file.is_file()
        }
    return found


def by_dali(paths, extensions, indexes=None) -> list[tuple[bytes, ...]]:
    """The members of these extensions, for each sample; empty where there is none."""
    from nvidia.dali import Pipeline, fn

    found = []
    for number, path in enumerate(paths):
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            outputs = fn.readers.webdataset(
                name="reader",
                paths=[str(path)],
                index_paths=[str(indexes[number])] if indexes else [],
                ext=list(extensions),
                missing_component_behavior="empty",
            )
            outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            pipeline.set_outputs(*outputs)
        pipeline.build()
        runs = (pipeline.run() for _ in range(pipeline.epoch_size("reader")))
        found += [tuple(bytes(part.at(0)) for part in outputs) for outputs in runs]
    return found


def flat(samples: Samples) -> list[tuple[str, bytes]]:
    """Members by name, as they lie in a tar."""
    return [(f"{key}.{e}", data) for key, members in samples for e, data in members.items()]


def contents(folder) -> dict[str, str]:
    """A digest of every file in a folder and below, but for the plan, which names the run."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != "_plan.json"
    }


def written_by_tarfile(members: list[tuple[str, bytes]]) -> bytes:
    """The same members as the standard library writes them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def resized_by_pillow(
    image: np.ndarray, shape: tuple[int, int], filter=Image.Resampling.BILINEAR
) -> np.ndarray:
    """An image of one or three channels, resized to (height, width)."""
    pixels = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    made = pixels.resize(shape[::-1], filter, reducing_gap=None)
    return np.asarray(made).reshape(*shape, image.shape[2])


def resized_by_dali(
    images: list[np.ndarray], regions: Sequence[Region] | None = None, **options
) -> list[np.ndarray]:
    """Images, or regions of them, resized by the operators that a GPU gets, here on the CPU.

    ``options`` are those of a `DecodeSpec`.
    """
    from nvidia.dali import Pipeline, fn, types

    from dask_image_ingest.decode import DecodeSpec
    from dask_image_ingest.decode.dali import gpu_resized, place

    decoding = DecodeSpec(device="gpu", **options)
    regions = regions or [Region.whole(image) for image in images]

    pipeline = Pipeline(batch_size=len(images), num_threads=2, device_id=None)
    with pipeline:
        given = fn.external_source(name="images", dtype=types.UINT8, layout="HWC")
        places = fn.external_source(name="places", dtype=types.INT32, ndim=1)
        pipeline.set_outputs(gpu_resized(given, decoding, places))
    pipeline.build()
    pipeline.feed_input("images", images)
    pipeline.feed_input("places", np.array([place(each, decoding) for each in regions], np.int32))
    (made,) = pipeline.run()
    return [np.array(image) for image in made]
