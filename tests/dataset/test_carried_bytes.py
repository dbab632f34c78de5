"""Images whose encoded bytes travel with their rows are decoded as Pillow decodes the files."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tars import tar

import dask_image_ingest as dii

FORMATS = {
    "gif": ("GIF", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "ppm": ("PPM", {}),
    "jp2": ("JPEG2000", {}),
    "png": ("PNG", {}),
    "webp": ("WEBP", {"lossless": True}),
}
GREY = np.random.default_rng(0).integers(0, 200, (9, 13), np.uint8)
COLOURS = np.random.default_rng(1).integers(0, 256, (9, 13, 3), np.uint8)


def files_for(mode):
    """An image of each format; WebP knows no labels."""
    picture = Image.fromarray(GREY if mode == "labels" else COLOURS)
    files = {}
    for suffix, (name, options) in FORMATS.items():
        if (mode, suffix) != ("labels", "webp"):
            file = io.BytesIO()
            picture.save(file, name, **options)
            files[suffix] = file.getvalue()
    return files


def from_parquet(files, mode, folder):
    pq.write_table(pa.table({"image": list(files.values())}), folder / "a.parquet")
    return dii.read_parquet_images(folder / "a.parquet", mode=mode, backend="pandas").compute()


def from_column(files, mode, folder):
    frame = pd.DataFrame({"file": list(files.values())})
    return dii.decode_images(frame, image={"image": "file"}, mode=mode)


def from_compressed_shard(files, mode, folder):
    members = {f"{n}.{suffix}": data for n, (suffix, data) in enumerate(files.items())}
    (folder / "a.tar.gz").write_bytes(gzip.compress(tar(members)))
    ddf = dii.read_webdataset_images(folder / "a.tar.gz", mode=mode, backend="pandas")
    return ddf.shuffle("nbytes").compute().sort_values("__key__")


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask, shuffling
@pytest.mark.parametrize("read", [from_parquet, from_column, from_compressed_shard])
@pytest.mark.parametrize("mode", ["RGB", "raw", "labels"])
def test_every_format_is_decoded_from_bytes_that_are_carried(read, mode, tmp_path):
    files = files_for(mode)
    frame = read(files, mode, tmp_path)
    assert len(frame) == len(files)
    for array, error, suffix in zip(frame.images.arrays(), frame["error"], files, strict=True):
        if (mode, suffix) == ("raw", "jp2"):  # Pillow does not tell its values as stored
            assert error.startswith("unsupported")
            continue
        with Image.open(io.BytesIO(files[suffix])) as picture:
            want = np.asarray(picture.convert("RGB") if mode == "RGB" else picture)
        assert pd.isna(error), suffix
        np.testing.assert_array_equal(array, want.reshape(*want.shape[:2], -1), suffix)
