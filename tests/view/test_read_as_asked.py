"""Thumbnails are read with the options of the reads and late decodes that make the images."""

from __future__ import annotations

import dask.dataframe as dd
import numpy as np
import pytest
from guarded import put_guarded
from html_page import Page
from PIL import Image
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.dataset import POINTER


@pytest.fixture
def guarded(photos):
    """Two shards that open to those who know a word."""
    put_guarded(
        {
            f"/in/{name}.tar": tar({f"{name}{n}.jpg": photos[n].encoded for n in (0, 1)})
            for name in "ab"
        }
    )
    return ["guarded://in/a.tar", "guarded://in/b.tar"]


def read(url, word="sesame", **options):
    storage_options = {"word": word} if word else None
    return dii.read_webdataset_images(
        url, backend="pandas", storage_options=storage_options, **options
    )


def errors(sheet):
    return [card.error for card in sheet.cards]


def without_pixels(frame):
    return frame.drop(columns=["image", "error"])


SESAME = {"word": "sesame"}
GUARDED = {
    "read": lambda urls, _: read(urls),
    "metadata": lambda urls, _: without_pixels(read(urls)),
    "late decode of rows in memory": lambda urls, _: dii.decode_images(
        dd.from_pandas(without_pixels(read(urls)).compute(), npartitions=2), storage_options=SESAME
    ),
    "concat": lambda urls, _: dd.concat([read(urls[0]), read(urls[1], "please")]),
    "concat of metadata": lambda urls, _: dd.concat(
        [without_pixels(read(urls[0])), without_pixels(read(urls[1], "please"))]
    ),
    "concat with a late decode": lambda urls, _: dd.concat(
        [
            read(urls[0], "please")[["__key__", *POINTER, "image"]],
            dii.decode_images(without_pixels(read(urls[1])), storage_options=SESAME)[
                ["__key__", *POINTER, "image"]
            ],
        ]
    ),
    "merge": lambda urls, _: without_pixels(read(urls)).merge(
        read(urls, "please")[["__key__", "image"]], on="__key__"
    ),
    "checkpoint": lambda urls, folder: dii.checkpoint(without_pixels(read(urls)), folder / "kept"),
    "function": lambda urls, _: without_pixels(read(urls)).map_partitions(lambda rows: rows),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GUARDED)
def test_shards_open_with_the_options_they_were_read_with(guarded, kind, tmp_path):
    frame = GUARDED[kind](guarded, tmp_path)
    assert errors(frame.images.show(9)) == [None] * 4
    assert errors(dii.gallery(frame, tmp_path / "out.html")) == [None] * 4


def test_each_part_of_a_concat_has_its_own_options(guarded):
    one, other = read(guarded[0]), read(guarded[1], "please", max_pixels=1000)
    rows = dd.concat([one, other, one])
    told = errors(rows.images.show(9))
    assert told[:2] == told[4:] == [None, None]
    assert [error.split(":")[0] for error in told[2:4]] == ["too-large"] * 2
    assert errors(rows.images.show(9)) == rows.error.compute().replace({np.nan: None}).tolist()
    # Nothing tells which rows are of which read: the frame is asked.
    same = dd.concat([one, read(guarded[0], max_pixels=1000)])
    told = errors(same.images.show(9))
    assert told[:2] == [None, None]
    assert [error.split(":")[0] for error in told[2:]] == ["too-large"] * 2


def test_options_that_are_given_hold_for_all(guarded):
    frame = dd.from_pandas(without_pixels(read(guarded)).compute(), npartitions=1)
    with pytest.raises(dii.ShardError, match="what is the word"):
        frame.images.show()
    assert errors(frame.images.show(storage_options=SESAME)) == [None] * 4
    other = dd.concat([read(guarded[0]), read(guarded[1], "please", max_pixels=1000)])
    assert errors(other.images.show(storage_options=SESAME))[:2] == [None, None]


def test_a_late_decode_may_run_commands_for_thumbnails(shards):
    rows = without_pixels(dii.read_webdataset_images(shards[0], backend="pandas")).compute()
    rows["__url__"] = f"pipe:cat {shards[0]}"
    frame = dd.from_pandas(rows, npartitions=1)
    late = dii.decode_images(frame, allow_pipes=True)
    assert errors(late.images.show()) == [None] * 8
    with pytest.raises(dii.ArgumentError, match="is a command"):
        frame.images.show()


class TestMaxPixels:
    @pytest.fixture
    def bomb(self, tmp_path):
        file = tmp_path / "large.png"
        Image.new("1", (20_000, 10_000)).save(file)
        (tmp_path / "large.tar").write_bytes(tar({"large.png": file.read_bytes()}))
        file.unlink()
        return tmp_path / "large.tar"

    @pytest.mark.slow
    def test_what_the_read_refuses_is_not_decoded_for_a_thumbnail(self, bomb, tmp_path):
        frame = dii.read_webdataset_images(bomb, backend="pandas")
        (told,) = frame.error.compute()
        assert told.startswith("too-large")
        table = without_pixels(frame)
        for each in (frame, table, table.compute(), dii.decode_images(table), table.persist()):
            assert errors(each.images.show()) == [told]
            assert errors(dii.gallery(each, tmp_path / "out.html")) == [told]
        assert told.partition(": ")[2] in Page((tmp_path / "out.html").read_text()).text

    def test_the_limit_is_that_of_the_read_or_of_the_late_decode(self, shards):
        few = dii.read_webdataset_images(shards[0], backend="pandas", max_pixels=20_000)
        late = dii.decode_images(without_pixels(few), max_pixels=30_000)
        for frame in (few, late):
            want = frame.error.compute().isna().tolist()
            assert len(set(want)) == 2
            assert [error is None for error in errors(frame.images.show())] == want
        want = few.error.compute().isna().tolist()
        shown = errors(without_pixels(few).images.show())
        assert [error is None for error in shown] == want
