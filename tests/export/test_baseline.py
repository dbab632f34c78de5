"""``jpeg="baseline"``: other codings become baseline, and no coefficient changes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from corpus import images, picture, save
from jpegs import PROFILE, coefficients, never_baseline, not_baseline, pixels, segments
from PIL import Image
from tars import tar
from witnesses import by_webdataset, contents, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ExportError, MissingDependencyError
from dask_image_ingest.export.transcode import libjpeg_turbo
from dask_image_ingest.export.transcode.libjpeg_turbo import BaselineError, to_baseline
from dask_image_ingest.storage.output import local_store

BASELINE, SCAN = 0xC0, 0xDA


def table_of(folder, pictures: dict[str, bytes], extension: str = "jpg"):
    members = [
        member
        for name, picture in pictures.items()
        for member in ((f"{name}.{extension}", picture), (f"{name}.txt", name.encode()))
    ]
    (folder / "in.tar").write_bytes(tar(members))
    read = dii.read_webdataset_images(folder / "in.tar", backend="pandas")
    return read.drop(columns=["image", "error"])


def exported(frame, folder, **options) -> dict[str, dict[str, bytes]]:
    options = {"jpeg": "baseline"} | options
    dii.to_webdataset(frame, folder / "out" / "{shard:03d}.tar", **options)
    return dict(by_webdataset(shards_in(folder / "out")))


@pytest.mark.slow
@pytest.mark.parametrize("name", not_baseline())
def test_no_coefficient_changes(name, tmp_path):
    before = not_baseline()[name]
    after = exported(table_of(tmp_path, {name: before}), tmp_path)[name]["jpg"]
    kinds = [kind for kind, _ in segments(after)]
    assert BASELINE in kinds
    assert kinds.count(SCAN) == 1
    np.testing.assert_array_equal(pixels(before), pixels(after), strict=True)
    if "arithmetic" not in name:  # which jpeglib does not read
        expected, found = (coefficients(jpeg, tmp_path) for jpeg in (before, after))
        assert len(expected) == len(found) >= 2
        for theirs, ours in zip(expected, found, strict=True):
            np.testing.assert_array_equal(theirs, ours, strict=True)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_progressive_jpeg_becomes_what_pillow_writes_as_baseline(subsampling):
    options = {"quality": 90, "subsampling": subsampling}
    progressive = save(picture(), "JPEG", progressive=True, **options)
    assert to_baseline(progressive) == save(picture(), "JPEG", **options)


def test_orientation_profile_and_comment_are_kept(tmp_path):
    found = exported(table_of(tmp_path, not_baseline()), tmp_path)
    turned = Image.open(io.BytesIO(found["turned"]["jpg"]))
    assert turned.getexif()[0x0112] == 6
    kept = Image.open(io.BytesIO(found["profile"]["jpg"]))
    assert kept.info["icc_profile"] == PROFILE
    assert kept.info["comment"] == b"kept"
    read = dii.read_webdataset_images(tmp_path / "out", backend="pandas")
    rows = read.compute().set_index("__key__")
    assert rows.loc["turned", "height"] == picture().width


def test_all_other_pictures_stay_byte_for_byte(tmp_path, photos):
    other = {
        name: image
        for name, image in images().items()
        if not name.startswith("jpeg") or "progressive" not in name
    }
    other = {name: image for name, image in other.items() if "arithm" not in name}
    del other["jpeg-lossless"]
    found = exported(table_of(tmp_path, other), tmp_path)
    assert {name: members["jpg"] for name, members in found.items()} == other


def test_members_that_are_not_the_picture_stay(tmp_path):
    progressive = not_baseline()["420"]
    (tmp_path / "in.tar").write_bytes(tar({"a.jpg": progressive, "a.seg.jpg": progressive}))
    read = dii.read_webdataset_images(tmp_path / "in.tar", backend="pandas")
    found = exported(read.drop(columns=["image", "error"]), tmp_path)["a"]
    assert found["seg.jpg"] == progressive
    assert found["jpg"] != progressive


@pytest.mark.parametrize("name", never_baseline())
def test_what_cannot_be_baseline_is_refused_before_anything_is_written(name, tmp_path):
    frame = table_of(tmp_path, {"good": not_baseline()["420"], "bad": never_baseline()[name]})
    with pytest.raises(ArgumentError, match=r"bad of .*in\.tar, byte \d+: not-baseline: \w"):
        exported(frame, tmp_path)
    assert not (tmp_path / "out").exists()
    found = exported(frame, tmp_path, errors="drop")
    assert list(found) == ["good"]


def test_the_reason_is_told_with_the_row(tmp_path):
    frame = table_of(tmp_path, never_baseline())
    told = dii.to_webdataset(frame, tmp_path / "{shard}.tar", jpeg="baseline", errors="drop").attrs[
        "left_out"
    ]
    assert told["not-baseline"]["count"] == len(never_baseline())
    assert told["not-baseline"]["detail"].startswith("truncated")


def test_a_stopped_export_goes_on_to_the_same_bytes_and_another_way_is_refused(
    tmp_path, monkeypatch
):
    frame = table_of(tmp_path, not_baseline())
    options = {"jpeg": "baseline", "samples_per_shard": 3}
    dii.to_webdataset(frame, tmp_path / "whole" / "{shard}.tar", **options)
    commit = local_store.LocalStore.commit

    def stopping(self, file, name, *args):
        if name == "2.tar":
            raise KeyboardInterrupt
        commit(self, file, name, *args)

    with monkeypatch.context() as patched:
        patched.setattr(local_store.LocalStore, "commit", stopping)
        with pytest.raises(KeyboardInterrupt):
            dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", **options)
    with pytest.raises(ExportError, match="jpeg was 'baseline' and is 'keep' now"):
        dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", samples_per_shard=3, resume=True)
    monkeypatch.setattr("dask_image_ingest.export.transcode.transcode.to_baseline", None)
    dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", resume=True, **options)
    for name in ("0.tar", "1.tar", "2.tar", "3.tar"):
        assert contents(tmp_path / "out")[name] == contents(tmp_path / "whole")[name]


def test_compressed_shards_too(tmp_path):
    import gzip

    pictures = not_baseline()
    table_of(tmp_path, pictures)
    plain = (tmp_path / "in.tar").read_bytes()
    (tmp_path / "packed.tar.gz").write_bytes(gzip.compress(plain))
    found = []
    for name in ("in.tar", "packed.tar.gz"):
        frame = dii.read_webdataset_images(tmp_path / name, backend="pandas")
        frame = frame.drop(columns=["image", "error"])
        out = tmp_path / name.replace(".", "-")
        dii.to_webdataset(frame, out / "{shard}.tar", sidecar=None, jpeg="baseline")
        found.append((out / "0.tar").read_bytes())
    assert found[0] == found[1]


def test_without_the_library_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(libjpeg_turbo, "_candidates", lambda: iter(["libnone.so"]))
    libjpeg_turbo.require_turbojpeg.cache_clear()
    try:
        with pytest.raises(MissingDependencyError, match=r"dask-image-ingest\[jpeg\]"):
            exported(table_of(tmp_path, not_baseline()), tmp_path)
    finally:
        libjpeg_turbo.require_turbojpeg.cache_clear()


def test_damaged_jpegs_are_refused_or_keep_their_coefficients(tmp_path, rng):
    kinds = not_baseline()
    seeds = [kinds[name] for name in ("420", "grey", "restart", "cmyk")]
    kept = 0
    for number in range(400):
        damaged = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        try:
            after = to_baseline(bytes(damaged))
        except BaselineError:
            continue
        # Not pixels: decoders smooth those of a picture that lacks some of its scans.
        expected, found = (coefficients(jpeg, tmp_path) for jpeg in (bytes(damaged), after))
        assert len(expected) == len(found), f"{number=}"
        for theirs, ours in zip(expected, found, strict=True):
            np.testing.assert_array_equal(theirs, ours, err_msg=f"{number=}")
        kept += 1
    assert kept > 20


def test_a_damaged_arithmetic_jpeg_is_refused_or_keeps_its_pixels(rng):
    whole = not_baseline()["arithmetic"]
    kept, too_large = 0, 0
    for number in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        try:
            after = to_baseline(bytes(damaged))
        except BaselineError as error:
            too_large += "larger than any" in str(error)
            continue
        expected, found = pixels(bytes(damaged)), pixels(after)
        np.testing.assert_array_equal(expected, found, err_msg=f"{number=}", strict=True)
        kept += 1
    assert kept > 200
    assert too_large > 2
