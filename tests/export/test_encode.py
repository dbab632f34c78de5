"""``Encode(...)``: the settings of members that are encoded from pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from corpus import picture, save
from PIL import Image
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest import Encode
from dask_image_ingest.errors import ArgumentError, ExportError


@pytest.fixture
def small(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=48, resize="shorter")


def exported(frame, folder, **options):
    dii.to_webdataset(frame, folder / "{shard:03d}.tar", **options)
    return dict(by_webdataset(shards_in(folder)))


def test_resized_images_look_as_they_did_and_all_else_stays(small, photos, tmp_path):
    finest = Encode("image", quality=100, subsampling="444")
    found = exported(small, tmp_path, members={"jpg": finest})
    frame = small.compute()
    for photo, key, array in zip(photos, frame["__key__"], frame.images.arrays(), strict=True):
        members = found[key]
        now = Image.open(io.BytesIO(members.pop("jpg")))
        assert (now.mode, now.format, now.info.get("progressive")) == ("RGB", "JPEG", None)
        assert np.abs(np.asarray(now).astype(int) - array).mean() < 1
        others = {name: data for name, data in photo.members.items() if name != photo.extension}
        assert members == others


@pytest.mark.parametrize("subsampling", ["420", "422", "444"])
def test_quality_and_subsampling_are_those_of_libjpeg(subsampling, small, tmp_path):
    members = {"jpg": Encode("image", quality=77, subsampling=subsampling)}
    theirs = save(picture(), "JPEG", quality=77, subsampling=":".join(subsampling))
    expected = Image.open(io.BytesIO(theirs))
    for found in exported(small.partitions[:1], tmp_path, members=members).values():
        image = Image.open(io.BytesIO(found["jpg"]))
        assert image.quantization == expected.quantization
        assert [part[1:3] for part in image.layer] == [part[1:3] for part in expected.layer]


def test_quality_is_that_of_webp_too(small, tmp_path):
    sizes = []
    for quality in (10, 95):
        members = {"webp": Encode("image", quality=quality)}
        found = exported(small, tmp_path / str(quality), members=members)
        sizes.append(sum(len(each["webp"]) for each in found.values()))
    assert sizes[1] > 2 * sizes[0]


def test_another_quality_is_another_export(small, tmp_path):
    options = {"samples_per_shard": 5}
    first = exported(small, tmp_path, members={"jpg": "image"}, **options)
    members = {"jpg": Encode("image", quality=80)}
    with pytest.raises(ExportError, match=r"'quality': 92.*'quality': 80"):
        exported(small, tmp_path, members=members, resume=True, **options)
    assert exported(small, tmp_path, members={"jpg": "image"}, resume=True, **options) == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"quality": 0}, "quality=0"),
        ({"quality": 101}, "quality=101"),
        ({"quality": True}, "quality=True"),
        ({"subsampling": "4:2:0"}, "subsampling='4:2:0'; choose '420', '422' or '444'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ArgumentError) as refused:
        Encode("image", **arguments)
    assert said in str(refused.value)


def test_a_column_without_pixels_is_refused(small, tmp_path):
    with pytest.raises(ArgumentError, match=r"columns of pixels are 'image'"):
        exported(small, tmp_path, members={"jpg": Encode("txt")})
