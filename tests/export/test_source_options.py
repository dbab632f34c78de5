"""Shards are read for an export with the options that the frame was read with, or it is said."""

from __future__ import annotations

import pytest
from guarded import put_guarded
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError


@pytest.fixture
def url():
    put_guarded(
        {
            f"/in/{number}.tar": tar({f"{number}{n}.jpg": b"image" for n in range(3)})
            for number in range(2)
        }
    )
    return "guarded://in/"


def read(url, word="sesame"):
    options = {"word": word} if word else None
    frame = dii.read_webdataset_images(url, backend="pandas", storage_options=options)
    return frame.drop(columns=["image", "error"])


def export(frame, tmp_path, **options):
    return dii.to_webdataset(frame, f"{tmp_path}/out/{{shard}}.tar", **options)


LAZY = {
    "read": lambda url, _: read(url),
    "sorted": lambda url, _: read(url).sort_values("__key__"),
    "checkpoint": lambda url, folder: dii.checkpoint(read(url), folder),
    "checkpoint of a checkpoint": lambda url, folder: dii.checkpoint(
        dii.checkpoint(read(url), folder / "one"), folder / "two"
    ),
}


@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_frame_knows_its_options(kind, url, tmp_path):
    frame = LAZY[kind](url, tmp_path / "stored")
    assert export(frame, tmp_path)["samples"].tolist() == [6]


@pytest.mark.parametrize("row_errors", ["raise", "drop"])
@pytest.mark.parametrize("computed", ["compute", "persist"])
def test_a_frame_that_has_lost_them_says_so(computed, row_errors, url, tmp_path):
    frame = getattr(read(url), computed)()
    with pytest.raises(ArgumentError, match=r"6 of 6 rows .*pass them as source_options=:"):
        export(frame, tmp_path, row_errors=row_errors)
    assert not (tmp_path / "out").exists()
    told = export(frame, tmp_path, row_errors=row_errors, source_options={"word": "sesame"})
    assert told["samples"].tolist() == [6]


def test_options_that_differ_are_refused(url, tmp_path):
    one, other = read(url + "0.tar"), read(url + "1.tar", "please")
    frame = one.merge(other[["__key__"]], on="__key__", how="left")
    with pytest.raises(ArgumentError, match=r"reads guarded://in/0.tar and guarded://in/1.tar"):
        export(frame, tmp_path)
    told = export(frame, tmp_path, source_options={"word": "sesame"})
    assert told["samples"].tolist() == [3]


def test_shards_of_this_machine_need_none(url, tmp_path):
    (tmp_path / "in.tar").write_bytes(tar({"a.jpg": b"a"}))
    here = read(tmp_path / "in.tar", None)
    for frame in (
        here.merge(read(url)[["__key__"]], on="__key__", how="left"),
        read(url).merge(here[["__key__"]], on="__key__", how="left"),
    ):
        count = len(frame)
        assert export(frame, tmp_path, overwrite=True)["samples"].tolist() == [count]
