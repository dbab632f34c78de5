"""``jpeg=Encode(...)``: every picture is decoded, turned, resized if asked, and encoded."""

from __future__ import annotations

import io
from dataclasses import replace
from math import ceil

import numpy as np
import pandas as pd
import pytest
from corpus import images, picture, save
from jpegs import pixels, segments
from PIL import Image, ImageOps
from tars import tar
from witnesses import by_webdataset, contents, shards_in

import dask_image_ingest as dii
from dask_image_ingest import Encode
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export.transcode import transcode

RESTART_INTERVAL = 0xDD

# What loses least, so that pixels can be compared.
FINEST = Encode(quality=100, subsampling="444")


@pytest.fixture
def table(shards):
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


def exported(frame, folder, encode=None, **options):
    path = folder / "{shard:03d}.tar"
    return dii.to_webdataset(frame, path, jpeg=encode or Encode(), **options)


def written(folder) -> dict[str, dict[str, bytes]]:
    return dict(by_webdataset(shards_in(folder)))


def test_pictures_look_as_they_did_and_all_else_stays(table, photos, tmp_path):
    exported(table, tmp_path, FINEST)
    found = written(tmp_path)
    assert list(found) == [photo.key for photo in photos]
    for photo in photos:
        members = found[photo.key]
        now = Image.open(io.BytesIO(members.pop("jpg")))
        assert (now.mode, now.format) == ("RGB", "JPEG")
        assert np.abs(np.asarray(now).astype(int) - photo.pixels).mean() < 1
        others = {name: data for name, data in photo.members.items() if name != photo.extension}
        assert members == others


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_leaves_upright_without_its_tag(orientation, tmp_path):
    before = images()[f"jpeg-exif-{orientation}"]
    (tmp_path / "in.tar").write_bytes(tar({"a.jpeg": before}))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    exported(frame, tmp_path / "out")
    now = Image.open(io.BytesIO(written(tmp_path / "out")["a"]["jpg"]))
    assert not now.getexif()
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(before))))
    assert np.asarray(now).shape == upright.shape
    assert np.abs(np.asarray(now).astype(int) - upright).mean() < 4


def test_a_line_that_would_be_enormous_is_left_out(tmp_path):
    line, good = (save(Image.new("RGB", shape), "PNG") for shape in ((60_000, 1), (60, 40)))
    (tmp_path / "in.tar").write_bytes(tar({"a.png": line, "b.png": good}))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    exported(frame, tmp_path / "out", Encode(size=64, resize="shorter"), errors="drop")
    assert list(written(tmp_path / "out")) == ["b"]
    left_out = pd.read_parquet(tmp_path / "out" / "_left_out.parquet")
    assert left_out["reason"].str.startswith("bad-image: too-large: ").tolist() == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encode", "shape"),
    [
        (replace(FINEST, size=48), (48, 48)),
        (replace(FINEST, size=(40, 60), resize="crop"), (40, 60)),
        (replace(FINEST, size=64, resize="shorter"), None),
    ],
    ids=str,
)
def test_sizes_are_those_of_a_read(encode, shape, table, photos, tmp_path):
    exported(table, tmp_path, encode)
    found = written(tmp_path)
    read = dii.decode_images(table, size=encode.size, resize=encode.resize).compute()
    for key, array in zip(read["__key__"], read.images.arrays(), strict=True):
        now = pixels(found[key]["jpg"])
        assert now.shape == array.shape
        assert shape is None or now.shape[:2] == shape
        assert np.abs(now.astype(int) - array).mean() < 1


@pytest.mark.parametrize("subsampling", ["420", "422", "444"])
def test_quality_and_subsampling_are_those_of_libjpeg(subsampling, table, photos, tmp_path):
    exported(table, tmp_path, Encode(quality=77, subsampling=subsampling))
    theirs = save(picture(), "JPEG", quality=77, subsampling=":".join(subsampling))
    expected = [part for part in segments(theirs) if part[0] in (0xDB, 0xC4)]
    sampling = segments(theirs)[[kind for kind, _ in segments(theirs)].index(0xC0)][1][6:]
    for members in written(tmp_path).values():
        parts = segments(members["jpg"])
        assert [part for part in parts if part[0] in (0xDB, 0xC4)] == expected
        assert dict(parts)[0xC0][6:] == sampling
        assert RESTART_INTERVAL not in dict(parts)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_restart_markers_stand_after_whole_rows_of_blocks(rows, table, tmp_path):
    exported(table, tmp_path / "with", Encode(restart_rows=rows))
    exported(table, tmp_path / "without", Encode())
    plain = written(tmp_path / "without")
    for key, members in written(tmp_path / "with").items():
        jpeg = members["jpg"]
        height, width, _ = pixels(jpeg).shape
        across, down = ceil(width / 16), ceil(height / 16)
        assert int.from_bytes(dict(segments(jpeg))[RESTART_INTERVAL], "big") == rows * across
        start = jpeg.index(b"\xff\xda")
        markers = sum(jpeg.count(bytes((0xFF, 0xD0 + n)), start) for n in range(8))
        assert markers == ceil(down / rows) - 1
        np.testing.assert_array_equal(pixels(jpeg), pixels(plain[key]["jpg"]))


def test_the_sidecar_tells_of_the_new_picture(table, photos, tmp_path):
    exported(table, tmp_path, Encode(size=(32, 48)), samples_per_shard=7)
    sidecars = [pd.read_parquet(path) for path in sorted(tmp_path.glob("*.parquet"))]
    found = pd.concat(sidecars, ignore_index=True)
    told = found[["format", "height", "width", "channels"]].drop_duplicates()
    assert told.to_numpy().tolist() == [["jpeg", 32, 48, 3]]
    in_shards = written(tmp_path)
    for row in found.to_dict("records"):
        with open(row["__url__"], "rb") as file:
            file.seek(row["offset"])
            assert file.read(row["nbytes"]) == in_shards[row["__key__"]]["jpg"]
    again = dii.decode_images(found)
    assert again["error"].isna().all()


def test_a_sample_without_a_picture_leaves_as_it_is(tmp_path):
    members = {"a.png": images()["png-rgb-8"], "b.txt": b"no picture"}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    exported(frame, tmp_path / "out")
    found = pd.read_parquet(tmp_path / "out" / "000.parquet").set_index("__key__")
    assert found.loc["a", "format"] == "jpeg"
    assert pd.isna(found.loc["b", "format"])
    assert written(tmp_path / "out")["b"] == {"txt": b"no picture"}


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_partitions_order_or_memory(
    shards, table, tmp_path, monkeypatch
):
    encode = Encode(size=100, resize="longer")
    exported(table, tmp_path / "a", encode, sidecar=None)
    expected = written(tmp_path / "a")
    frame = table.compute().sample(frac=1, random_state=3)
    exported(frame, tmp_path / "b", encode, sidecar=None)
    assert written(tmp_path / "b") == expected
    monkeypatch.setattr("dask_image_ingest.export.transcode.transcode._PIXELS", 1)
    exported(table.repartition(npartitions=1), tmp_path / "c", encode, sidecar=None)
    assert (tmp_path / "c" / "000.tar").read_bytes() == (tmp_path / "a" / "000.tar").read_bytes()


@pytest.mark.slow
def test_a_resumed_export_has_the_same_bytes(table, tmp_path):
    options = {"samples_per_shard": 5}
    exported(table, tmp_path / "whole", **options)
    exported(table, tmp_path / "out", **options)
    (tmp_path / "out" / "002.tar").unlink()
    with pytest.raises(ExportError, match=r"'quality': 92.*'quality': 80"):
        exported(table, tmp_path / "out", Encode(quality=80), resume=True, **options)
    exported(table, tmp_path / "out", resume=True, **options)
    for path in shards_in(tmp_path / "whole"):
        assert contents(tmp_path / "out")[path.name] == contents(tmp_path / "whole")[path.name]


def test_a_bad_picture_is_a_row_that_cannot_be_exported(tmp_path):
    cut = save(picture(), "JPEG")[:-200]
    members = {"good.jpg": save(picture(), "JPEG"), "cut.jpg": cut, "html.jpg": b"<html>404</html>"}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    frame = frame.drop(columns=["image", "error"])
    with pytest.raises(ArgumentError, match=r"cut of .*: bad-image: truncated"):
        exported(frame, tmp_path / "out")
    told = exported(frame, tmp_path / "out", errors="drop")
    assert told.attrs["left_out"]["bad-image"]["first"] == ["cut", "html"]
    assert list(written(tmp_path / "out")) == ["good"]


def test_a_picture_takes_no_other_members_name(tmp_path):
    members = {"a.png": images()["png-rgb-8"], "a.jpg": save(picture(), "JPEG"), "b.png": b""}
    (tmp_path / "in.tar").write_bytes(tar(members))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas", image="png")
    frame = frame.drop(columns=["image", "error"])
    with pytest.raises(ArgumentError, match="duplicate-member: its png would become a second jpg"):
        exported(frame[frame["__key__"] == "a"], tmp_path / "out")
    exported(frame[frame["__key__"] == "a"], tmp_path / "out", members=["png"])
    assert list(written(tmp_path / "out")["a"]) == ["jpg"]


def test_a_member_made_of_a_column_is_left_as_it_is(table, tmp_path):
    frame = table[table["format"] == "jpeg"].assign(made="no picture at all")
    exported(frame, tmp_path, members={"jpg": "made"})
    assert {members["jpg"] for members in written(tmp_path).values()} == {b"no picture at all"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"quality": 0}, "quality=0"),
        ({"quality": 101}, "quality=101"),
        ({"quality": True}, "quality=True"),
        ({"subsampling": "4:2:0"}, "subsampling='4:2:0'; choose '420', '422' or '444'"),
        ({"restart_rows": 0}, "restart_rows=0"),
        ({"size": 0}, "size=0"),
        ({"resize": "crop"}, "resize='crop' does nothing without size="),
        ({"size": 9, "resize": "fit"}, "resize='fit'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said):
    with pytest.raises(ArgumentError) as refused:
        Encode(**arguments)
    assert said in str(refused.value)


@pytest.mark.parametrize("jpeg", ["progressive", "", None, 92, {"quality": 92}], ids=repr)
def test_jpeg_takes_two_words_and_an_encode(jpeg, table, tmp_path):
    with pytest.raises(ArgumentError, match=r"choose 'keep', 'baseline' or Encode\(\.\.\.\)"):
        dii.to_webdataset(table, tmp_path / "{shard}.tar", jpeg=jpeg)


@pytest.fixture
def encoded(monkeypatch):
    """The pictures that are encoded, one after the other; the run breaks off where it is told."""
    seen = []
    real = transcode._encoded

    def counting(array, how):
        if len(seen) == counting.until:
            raise KeyboardInterrupt
        seen.append(array.shape)
        return real(array, how)

    counting.until = None
    monkeypatch.setattr(transcode, "_encoded", counting)
    return counting, seen


@pytest.mark.slow
def test_pictures_that_are_made_are_not_made_again(table, tmp_path, encoded):
    breaking, seen = encoded
    exported(table, tmp_path / "whole", samples_per_shard=5)
    assert len(seen) == 24
    seen.clear()
    breaking.until = 13  # in the second of three source shards, of 8 each
    with pytest.raises(KeyboardInterrupt):
        exported(table, tmp_path / "out", samples_per_shard=5)
    assert not shards_in(tmp_path / "out")
    breaking.until = None
    seen.clear()
    exported(table, tmp_path / "out", samples_per_shard=5, resume=True)
    assert len(seen) == 16
    for path in shards_in(tmp_path / "whole"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "_staging").exists()


@pytest.mark.slow
def test_pictures_made_for_another_way_are_not_taken(table, tmp_path, encoded):
    breaking, seen = encoded
    exported(table, tmp_path / "whole", Encode(quality=50), sidecar=None)
    breaking.until = len(seen) + 13
    with pytest.raises(KeyboardInterrupt):
        exported(table, tmp_path / "out", Encode(quality=90), sidecar=None)
    breaking.until = None
    exported(table, tmp_path / "out", Encode(quality=50), sidecar=None, resume=True)
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_without_resume_they_are_removed(table, tmp_path, encoded):
    breaking, seen = encoded
    breaking.until = 13
    with pytest.raises(KeyboardInterrupt):
        exported(table, tmp_path)
    breaking.until = None
    seen.clear()
    exported(table, tmp_path)
    assert len(seen) == 24


def test_a_picture_that_no_jpeg_can_hold_is_a_row_that_is_left_out(tmp_path):
    wide = save(Image.new("L", (65_501, 2)), "PNG")
    widest = save(Image.new("L", (65_500, 2)), "PNG")
    (tmp_path / "in.tar").write_bytes(tar({"a.png": wide, "b.png": widest}))
    frame = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    with pytest.raises(ArgumentError, match=r"a of .*bad-image: its 65501 × 2 pixels.*size="):
        exported(frame, tmp_path / "out")
    exported(frame, tmp_path / "out", errors="drop")
    (key,) = found = written(tmp_path / "out")
    assert key == "b"
    assert Image.open(io.BytesIO(found[key]["jpg"])).size == (65_500, 2)
