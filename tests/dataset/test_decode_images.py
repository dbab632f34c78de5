"""Rows that lost their pixels, or never had any, get them from the bytes they point to."""

import io

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from photo_shards import write_tar
from PIL import Image
from tars import sparse_tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.references import fetch as late

LOCATION_COLUMNS = ["__url__", "offset", "nbytes"]


@pytest.fixture
def full(shards):
    """Each key's pixels as the read itself decodes them."""
    frame = dii.read_webdataset_images(shards, backend="pandas").compute()
    return pixels_of(frame)


@pytest.fixture
def table(shards):
    """A collection without pixels."""
    return dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])


@pytest.fixture
def decoded(monkeypatch):
    """How many images of how many bytes were read to be decoded, and in which order."""
    read = []

    def reading(*args):
        fetched = fetch(*args)
        read.extend(fetched[1])
        return fetched

    fetch = late.fetch
    monkeypatch.setattr(late, "fetch", reading)
    return read


def pixels_of(frame):
    arrays = frame.images.arrays()
    return {k: a.tobytes() for k, a in zip(frame["__key__"], arrays, strict=True)}


LABELS = pd.DataFrame({"cls": pd.array([0, 1], "int64[pyarrow]"), "name": ["a", "b"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation",
    [
        lambda d: d[d.width > 150],
        lambda d: d.merge(LABELS, on="cls"),
        lambda d: d.sort_values("width"),
        lambda d: d.sample(frac=0.5, random_state=3),
        lambda d: d.shuffle("cls"),
        lambda d: d.repartition(npartitions=2),
        lambda d: d.persist(),
        lambda d: d.set_index("cls"),
    ],
    ids=["filter", "merge", "sort", "sample", "shuffle", "repartition", "persist", "set_index"],
)
def test_pixels_come_to_their_keys_after(operation, table, full):
    frame = dii.decode_images(operation(table)).compute()
    assert len(frame)
    assert pixels_of(frame).items() <= full.items()
    assert frame["error"].isna().all()


def test_only_the_bytes_of_the_rows_that_are_left_are_read(table, photos, decoded):
    kept = table[table.width > 200]
    dii.decode_images(kept).compute()
    wide = [photo.encoded for photo in photos if photo.pixels.shape[1] > 200]
    assert sorted(decoded) == sorted(wide)


def test_a_pandas_frame_is_decoded_at_once_and_keeps_its_index(table, full):
    frame = table.compute().sample(7, random_state=1)
    got = dii.decode_images(frame)
    assert got.index.tolist() == frame.index.tolist()
    assert pixels_of(got).items() <= full.items()
    assert "image" not in frame


@pytest.mark.parametrize("lazy", [False, True])
def test_each_image_column_has_errors_of_its_own_whatever_is_decoded_first(shards, lazy):
    references = dii.read_webdataset_images(shards, backend="pandas", decode=False)
    both = references.assign(mask=references["image"])
    both = both if lazy else both.compute()
    bounds = {"image": 30_000, "mask": None}
    columns = [*both.columns, "error", "mask.error"]
    for names in (["image", "mask"], ["mask", "image"]):
        frame = both
        for name in names:
            frame = dii.decode_images(frame, image=name, max_pixels=bounds[name])
        frame = frame.compute() if lazy else frame
        assert sorted(frame.columns) == sorted(columns)
        large = frame.height * frame.width > 30_000
        assert 0 < large.sum() < len(frame)
        assert frame["error"].notna().tolist() == large.tolist()
        assert frame["mask.error"].isna().all()


def test_the_only_image_column_has_the_errors_of_a_frame_that_has_none(shards):
    photos = dii.read_webdataset_images(shards, backend="pandas", decode=False)
    photos = photos.rename(columns={"image": "photo"})
    assert "error" in dii.decode_images(photos).columns
    told = photos.assign(error="of something else")
    decoded = dii.decode_images(told).compute()
    assert set(decoded["error"]) == {"of something else"}
    assert decoded["photo.error"].isna().all()


def test_options_are_those_of_the_read(table, shards):
    got = dii.decode_images(table, size=(20, 30), resize="pad", mode="L").compute()
    want = dii.read_webdataset_images(
        shards, backend="pandas", size=(20, 30), resize="pad", mode="L"
    ).compute()
    assert pixels_of(got) == pixels_of(want)


def test_columns_and_filters_asked_for_later_go_below_the_decode(table, decoded):
    lazy = dii.decode_images(table)
    assert len(lazy) == 24
    assert lazy[["txt", "width"]].compute().shape == (24, 2)
    assert lazy.groupby("cls").size().compute().sum() == 24
    assert not decoded
    small = lazy[lazy.width < 150]
    frame = small[["__key__", "image"]].compute()
    assert len(decoded) == len(frame) == len(small)


def test_head_decodes_as_many_images_as_it_shows(table, decoded):
    assert len(dii.decode_images(table).head(3).images.arrays()) == 3
    assert len(decoded) == 3


def test_a_filter_on_error_is_answered_by_the_decode(table, decoded):
    lazy = dii.decode_images(table, max_pixels=30_000)
    frame = lazy[lazy.error.notnull()].compute()
    assert 0 < len(frame) < 24
    assert frame["error"].str.startswith("too-large").all()
    assert frame["image"].isna().all()


def test_a_filter_goes_below_a_decode_that_drops_bad_images(table, decoded):
    lazy = dii.decode_images(table, max_pixels=30_000, errors="drop")
    frame = lazy[lazy.width < 150].compute()
    assert len(decoded) == (table.width < 150).sum().compute()
    assert 0 < len(frame) < len(decoded)
    assert frame["error"].isna().all()


def test_what_adds_up_rows_sees_those_that_are_left_after_bad_images_are_dropped(table):
    options = {"max_pixels": 30_000, "errors": "drop"}
    lazy, eager = dii.decode_images(table, **options), dii.decode_images(table.compute(), **options)
    got = lazy[lazy.width > lazy.width.mean()].compute()
    want = eager[eager.width > eager.width.mean()]
    assert got["__key__"].tolist() == want["__key__"].tolist()
    assert eager.width.mean() != table.compute().width.mean()


# pandas says so of a mask that has more rows than the frame.
@pytest.mark.filterwarnings("ignore:Boolean Series key will be reindexed:UserWarning")
def test_a_mask_of_the_frame_before_works_after_bad_images_are_dropped(table):
    kept = dii.decode_images(table[table.width > 100], max_pixels=30_000, errors="drop")
    frame = kept[table.cls == 1].compute()
    assert len(frame)
    assert (frame.cls == 1).all()
    assert (frame.width > 100).all()


def test_a_mask_with_no_rows_for_the_dropped_ones_works(shards):
    options = {"max_pixels": 30_000, "errors": "drop"}
    lazy = dii.read_webdataset_images(shards, backend="pandas", max_pixels=30_000)
    decoded = lazy[lazy["image"].notnull()]
    got = dii.decode_images(lazy, **options)[decoded["__key__"].notnull()].compute()
    assert got["__key__"].tolist() == decoded["__key__"].compute().tolist()
    assert 0 < len(got) < 24


def test_a_predicate_is_not_asked_of_rows_that_are_dropped_where_it_may_raise(table):
    kept = dii.decode_images(table, max_pixels=30_000, errors="drop")

    def is_large(pixels):
        if pixels > 30_000:
            raise ValueError("an image of so many pixels is dropped")
        return pixels > 20_000

    large = kept[(kept.height * kept.width).map(is_large, meta=(None, "bool"))]
    assert 0 < len(large) < len(kept) < len(table)


def test_filters_follow_each_other_after_bad_images_are_dropped(table):
    options = {"max_pixels": 30_000, "errors": "drop"}
    lazy, eager = dii.decode_images(table, **options), dii.decode_images(table.compute(), **options)

    def keep(frame):
        some = frame[(frame.cls > 0) | frame.image.isna()]
        return some[some.format.isin(["jpeg"])]

    got = keep(lazy).compute()
    assert got["__key__"].tolist() == keep(eager)["__key__"].tolist()
    assert len(got)


def test_labels_and_lengths_are_known_without_a_decode(table, decoded):
    lazy = dii.decode_images(table)
    assert lazy.index.compute().tolist() == table.index.compute().tolist()
    assert len(lazy) == 24
    assert lazy.map_partitions(len).compute().tolist() == [8, 8, 8]
    assert len(decoded) == 24


def test_a_row_that_points_nowhere_is_an_error_row(table):
    frame = table.compute()
    frame.loc[frame.index[0], "offset"] = pd.NA
    got = dii.decode_images(frame.iloc[:3])
    assert got["error"].str.startswith("missing").tolist()[0]
    assert got["image"].isna().tolist() == [True, False, False]
    with pytest.raises(dii.ImageDecodeError, match="points to no image"):
        dii.decode_images(frame.iloc[:3], errors="raise")


def test_errors_can_be_raised_or_dropped(table):
    assert len(dii.decode_images(table, max_pixels=30_000, errors="drop")) < 24
    with pytest.raises(dii.ImageDecodeError, match=r"the image of sample .* too-large"):
        dii.decode_images(table, max_pixels=30_000, errors="raise").compute()


def test_bad_images_of_a_partition_are_one_line_in_the_log(table, caplog):
    frame = dii.decode_images(table.partitions[0], max_pixels=30_000).compute()
    (record,) = caplog.records
    assert (
        f"{frame.image.isna().sum()} of {len(frame)} images could not be decoded"
        in record.getMessage()
    )


def test_a_frame_without_locations_is_refused_at_once(table):
    with pytest.raises(dii.ArgumentError, match="'offset'"):
        dii.decode_images(table[["__key__", "__url__", "nbytes"]])


def test_a_partition_that_would_burst_is_refused_before_it_is_decoded(table, monkeypatch, shards):
    from dask_image_ingest.frames import pandas_backend as backend

    monkeypatch.setattr(backend, "worker_memory", lambda: 1_000_000)
    message = r"decode to .* GB, and one partition holds at most 0.0 GB"
    with pytest.raises(MemoryError, match=message):
        dii.decode_images(table).compute()
    with pytest.raises(MemoryError, match=rf"samples 0-7 of .*{message}"):
        dii.read_webdataset_images(shards, backend="pandas", partition_size=None).compute()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "double[pyarrow]", "object", "Int64", "uint64"])
def test_locations_keep_their_meaning_in_other_types(table, full, dtype):
    frame = table.compute().astype({"offset": dtype, "nbytes": dtype, "__url__": "category"})
    assert pixels_of(dii.decode_images(frame)) == full
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_pandas(frame.reset_index(drop=True), npartitions=2)
    assert pixels_of(dii.decode_images(lazy).compute()) == full


def test_rows_that_a_merge_added_point_nowhere(table, full):
    keys = pd.DataFrame({"__key__": [*[*full][:3], "of no sample"]})
    frame = table.compute().merge(keys, on="__key__", how="right")
    got = dii.decode_images(frame)
    assert got["error"].isna().tolist() == [True, True, True, False]
    assert got["error"].iloc[3].startswith("missing: ")
    assert pixels_of(got.iloc[:3]).items() <= full.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("__url__", None), ("__url__", ""), ("offset", None), ("nbytes", None),
        ("offset", -1), ("offset", 10**15), ("nbytes", 10**15), ("nbytes", -1),
    ],
)  # fmt: skip
def test_a_location_that_leads_nowhere_costs_one_row(table, full, column, value):
    frame = table.compute()
    frame.loc[frame.index == 2, column] = value
    got = dii.decode_images(frame)
    wrong = frame.index == 2
    assert got["error"][wrong].str.startswith("missing: ").all()
    assert got["image"].isna().tolist() == wrong.tolist()
    assert pixels_of(got[~wrong]).items() <= full.items()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("offset", [0.5]), ("offset", ["12"]), ("nbytes", [True]), ("__url__", [7]),
        ("__url__", [b"a.tar"]), ("offset", [[1]]), ("__url__", [object()]), ("nbytes", [2**64]),
    ],
)  # fmt: skip
def test_columns_that_are_no_locations_are_refused_by_name(table, column, values):
    frame = table.compute().iloc[:1].copy()
    frame[column] = values
    with pytest.raises(dii.ArgumentError, match=column):
        dii.decode_images(frame)
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_pandas(frame, npartitions=1)
    with pytest.raises(dii.ArgumentError, match=column):
        dii.decode_images(lazy).compute()


def bmp(shade):
    file = io.BytesIO()
    image = Image.new("RGB", (300, 300))
    image.putpixel((7, 7), (shade, 2, 3))
    image.save(file, "BMP")
    return file.getvalue()


def test_the_read_and_the_late_decode_say_the_same(tmp_path, photos):
    """Of samples with two images of one name, and of images that are stored with holes."""
    encoded = [photo.encoded for photo in photos[:4]]
    members = [("a.jpg", encoded[0]), ("a.jpg", encoded[1]), ("b.jpg", encoded[3])]
    twice = write_tar(tmp_path / "0.tar", members)
    holes = sparse_tar(tmp_path / "1.tar", {"c.bmp": bmp(1), "d.bmp": bmp(9), "e.bmp": b""})
    ddf = dii.read_webdataset_images([twice, holes], backend="pandas", size=16)
    want = ddf.compute()
    assert want["error"].str.partition(":")[0].tolist() == [
        "duplicate-member",
        *[pd.NA] * 3,
        "empty",
    ]
    assert want["offset"].notna().tolist() == [False, True, False, False, True]
    references = dii.read_webdataset_images([twice, holes], backend="pandas", decode=False)
    for frame in (references, references.compute()):
        got = dii.decode_images(frame, size=16)
        got = got.compute() if frame is references else got
        codes = (errors.str.partition(":")[0].fillna("") for errors in (got.error, want.error))
        assert next(codes).tolist() == next(codes).tolist()
        for ours, theirs in zip(got.images.arrays(), want.images.arrays(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # Without a reference only a range of the shard is found.
    located = dii.decode_images(ddf.drop(columns=["image", "error"]).compute(), size=16)
    missing = located["error"].str.startswith("missing").fillna(False)
    assert missing.tolist() == [1, 0, 1, 1, 0]
