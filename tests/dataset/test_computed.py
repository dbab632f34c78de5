"""Filters that are computed from metadata keep their rows before any image is decoded."""

from __future__ import annotations

import cloudpickle
import dask
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from nvidia.dali import fn
from photo_shards import make_photos, write_photo_shards, write_tar

import dask_image_ingest as dii

PHOTOS = 40


@pytest.fixture(scope="module")
def photos():
    return make_photos(PHOTOS)


@pytest.fixture(scope="module")
def shards(photos, tmp_path_factory):
    """Three shards; the second has an image that can't be decoded and a sample with none."""
    folder = tmp_path_factory.mktemp("shards")
    paths = write_photo_shards(photos, folder, 15)
    bad = [("bad.jpg", b"<html>"), ("bad.txt", b"bad"), ("none.txt", b"none"), ("none.cls", b"3")]
    good = [(f"{photo.key}.{e}", d) for photo in photos[:3] for e, d in photo.members.items()]
    return [str(path) for path in paths] + [str(write_tar(folder / "bad.tar", [*good, *bad]))]


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas", size=16)


def both_ways(make, **options):
    """The answer of a query as it is, and with filters after the decode."""
    got = make().compute(scheduler="sync", **options)
    with dask.config.set({"image-ingest.decode-late": False}):
        want = make().compute(scheduler="sync", **options)
    return got, want


def assert_same(got, want):
    if isinstance(want, pd.DataFrame):
        pd.testing.assert_frame_equal(got, want)
        assert got.dtypes.equals(want.dtypes)
    else:
        pd.testing.assert_series_equal(got, want)


def area(ddf):
    return ddf.height * ddf.width


COMPUTED = {
    "product": lambda ddf: ddf[area(ddf) > 40_000],
    "text": lambda ddf: ddf[ddf.txt.str.contains("1")],
    "text and number": lambda ddf: ddf[ddf.txt.str.contains("1") & (ddf.width > 200)],
    "assigned": lambda ddf: (lambda new: new[new.area > 40_000])(ddf.assign(area=area(ddf))),
    "assigned, few columns": lambda ddf: (lambda new: new[new.area > 40_000])(
        ddf.assign(area=area(ddf))
    )[["area", "image"]],
    "assigned and another": lambda ddf: (lambda new: new[(new.area > 40_000) & (new.cls > 1)])(
        ddf.assign(area=area(ddf), twice=ddf.cls * 2)
    ),
    "function": lambda ddf: ddf[ddf.txt.map(len, meta=("txt", "int64")) > 25],
    "two columns": lambda ddf: ddf[ddf.height < ddf.width],
    "chain": lambda ddf: (lambda wide: wide[area(wide) > 40_000])(ddf[ddf.width > 190]),
    "chain of computed": lambda ddf: (lambda wide: wide[wide.height * 2 > 400])(
        ddf[ddf.txt.str.len() > 24]
    ),
    "filled": lambda ddf: ddf[ddf.height.fillna(0) * 2 > 400],
}


@pytest.mark.slow
@pytest.mark.parametrize("query", COMPUTED)
def test_only_what_is_kept_is_decoded(ddf, work, query):  # noqa: F811
    make = COMPUTED[query]
    got = make(ddf).compute(scheduler="sync")
    decoded, work["decoded"] = work["decoded"], 0
    assert 0 < len(got) < PHOTOS
    assert decoded == len(got)
    with dask.config.set({"image-ingest.decode-late": False}):
        want = make(ddf).compute(scheduler="sync")
    assert work["decoded"] > decoded
    assert_same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "errors"),
    [
        *((query, "null") for query in COMPUTED),
        *((query, "drop") for query in ("text and number", "assigned", "chain", "filled")),
    ],
)
def test_bad_images_are_what_they_were(shards, query, errors):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16, errors=errors)
    assert_same(*both_ways(lambda: COMPUTED[query](ddf)))


def test_an_image_that_is_not_kept_raises_nothing(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16, errors="raise")
    assert len(ddf[area(ddf) > 0].compute(scheduler="sync")) == PHOTOS + 3
    with pytest.raises(dii.ImageDecodeError, match="bad"):
        ddf[ddf.txt.str.contains("bad")].compute(scheduler="sync")


@pytest.mark.slow
@pytest.mark.parametrize("late", ["errors", "filter"])
def test_a_function_never_sees_what_was_dropped_before(shards, late):
    """Integers have no nulls: a bad image has no height, and its row is gone before."""
    if late == "errors":
        ddf = dii.read_webdataset_images(shards, backend="pandas", size=16, errors="drop")
    else:
        ddf = dii.read_webdataset_images(shards, backend="pandas", size=16)
        ddf = ddf[ddf.error.isna()]
    for limit in (None, 2):
        kept = ddf[ddf.height.astype("int64") > 200]
        kept = kept if limit is None else kept.head(limit, npartitions=-1, compute=False)
        assert_same(*both_ways(lambda kept=kept: kept))
    whole = dii.read_webdataset_images(shards, backend="pandas", size=16)
    with pytest.raises(TypeError, match="NAType"):
        whole[whole.height.astype("int64") > 200].compute(scheduler="sync")


@pytest.mark.slow
def test_seeds_belong_to_samples(shards):
    def brighter(images):
        return fn.brightness(images, brightness=fn.random.uniform(range=(0.5, 1.5)))

    ddf = dii.read_webdataset_images(shards, backend="pandas", size=16, transform=brighter)
    assert_same(*both_ways(lambda: ddf[ddf.txt.str.contains("1")]))
    assert_same(*both_ways(lambda: ddf.query("height > 200").image))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda ddf: ddf[ddf.width > ddf.width.mean()],
        lambda ddf: ddf[ddf.width.cumsum() > 3000],
        lambda ddf: ddf[ddf.error.str.contains("x").isna()],
        lambda ddf: ddf[ddf.image.notnull() & (area(ddf) > 40_000)],
        lambda ddf: ddf.query("width > width.mean()"),
        lambda ddf: ddf.query("error.isna() and width > 200"),
        lambda ddf: ddf.head(7, npartitions=-1, compute=False).query("width > 200"),
        lambda ddf: ddf.assign(area=ddf.width.cumsum()).query("area > 3000"),
        lambda ddf: (lambda new: new[new.up > 1])(ddf.assign(up=ddf.cls.shift(1))),
        lambda ddf: ddf[area(ddf) > 40_000].merge(ddf[["offset", "image"]], on="offset")[["txt"]],
        lambda ddf: dask.dataframe.concat([ddf[area(ddf) > 40_000], ddf]),
    ],
)
def test_what_looks_further_has_its_answer_too(ddf, make):
    got, want = both_ways(lambda: make(ddf))
    if list(want.columns) == ["txt"]:  # of a merge, whose rows have no order
        got, want = (frame.sort_values("txt").reset_index(drop=True) for frame in (got, want))
    assert_same(got, want)


def test_a_read_that_is_used_elsewhere_is_not_done_twice(ddf, work):  # noqa: F811
    new = ddf.assign(area=area(ddf))
    large = new[new.area > 40_000]
    both = dask.compute(large, new, scheduler="sync")
    assert work["decoded"] == len(both[1]) - 2 + 2  # each row once, the bad ones included
    assert_same(both[0], both[1][(both[1].area > 40_000).fillna(False).astype(bool)])


@pytest.mark.slow
def test_persisted_frames_and_their_filters(ddf):
    kept = ddf[area(ddf) > 40_000].persist(scheduler="sync")
    assert_same(kept.compute(), both_ways(lambda: ddf[area(ddf) > 40_000])[1])
    assert_same(*both_ways(lambda: kept[kept.txt.str.contains("1")]))


def test_tasks_can_be_sent_with_their_predicates(ddf):
    ending = "1"
    kept = ddf[ddf.txt.map(lambda text: text.endswith(ending), meta=("txt", bool))]
    graph = cloudpickle.loads(cloudpickle.dumps(kept.optimize().__dask_graph__()))
    keys = kept.optimize().__dask_keys__()
    got = pd.concat(dask.get(graph, keys))
    assert_same(got, both_ways(lambda: kept)[1])


def test_it_can_be_seen(ddf, capsys):
    ddf[area(ddf) > 40_000].optimize(fuse=False).pprint()
    shown = capsys.readouterr().out
    assert "decode='image' steps=Filter(" in shown
    assert "rows['height'] * rows['width'] > 40000" in shown
    with dask.config.set({"image-ingest.decode-late": False}):
        ddf[area(ddf) > 40_000].optimize(fuse=False).pprint()
    assert "Filter:" in capsys.readouterr().out


def test_pixels_are_those_of_their_rows(shards, photos):
    frame = dii.read_webdataset_images(shards[0], backend="pandas")
    kept = frame[frame.txt.str.len() > 24].compute(scheduler="sync")
    by_key = {photo.key: photo for photo in photos}
    for key, image in zip(kept["__key__"], kept.images.arrays(), strict=True):
        assert np.abs(image.astype(int) - by_key[key].pixels).mean() < 2
