"""Shards of synthetic photographs: for machines that have Pillow and NumPy and little else."""

import io
import tarfile

import numpy as np
from PIL import Image


def photograph(height, width, seed=0):
    """A picture that compresses about as a photograph does: large shapes, fine grain."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(height // 24, 2), max(width // 24, 2), 3), np.uint8)
    shapes = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    grain = random.normal(0, 9, (height, width, 1))
    return Image.fromarray((np.asarray(shapes) + grain).clip(0, 255).astype(np.uint8))


def encode(image, extension="jpg"):
    file = io.BytesIO()
    formats = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "tiff": "TIFF"}
    image.save(file, formats[extension], quality=90)
    return file.getvalue()


def tiff(array, photometric="minisblack", **options):
    """A TIFF of an array (height, width, samples), by tifffile."""
    import tifffile

    file = io.BytesIO()
    if array.shape[2] == 1:
        array = array[..., 0]
    elif options.get("planarconfig") == "separate":
        array = np.moveaxis(array, 2, 0)
    else:
        options = options | {"planarconfig": "contig"}
    tifffile.imwrite(file, array, photometric=photometric, **options)
    return file.getvalue()


def bad_files():
    """Files that are no images, each in another way."""
    good = encode(photograph(60, 80))
    return {
        "cut": good[: len(good) // 2],
        "no-pixels": good[:200],
        "garbage": b"this is no image" * 50,
        "empty": b"",
    }


def damaged_file():
    """A JPEG that a decoder may take for bad, or make other pixels of than another decoder."""
    good = encode(photograph(60, 80))
    return good[: len(good) // 2] + bytes(len(good) // 3) + good[-2:]


def write_shards(folder, shards, per_shard, size=(240, 320), distinct=8, extensions=("jpg",)):
    """Shards of ``distinct`` images over and over, with captions; gives their paths."""
    height, width = size
    images = [
        encode(photograph(height + 4 * n, width - 4 * n, n), extensions[n % len(extensions)])
        for n in range(distinct)
    ]
    paths = []
    for shard in range(shards):
        members = {}
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            extension = extensions[number % distinct % len(extensions)]
            members[f"{number:06d}.{extension}"] = images[number % distinct]
            members[f"{number:06d}.txt"] = f"picture {number}".encode()
            members[f"{number:06d}.cls"] = str(number % 10).encode()
        paths.append(write_shard(folder / f"shard-{shard:04d}.tar", members))
    return paths


def write_shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)
