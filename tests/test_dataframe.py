"""The collection is a real dataframe: whatever is done to it, each key keeps its own pixels."""

import dask.dataframe as dd
import pandas as pd
import pytest
from processes import until

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def pixels(photos, shards):
    """What each key's pixels are, read once."""
    frame = dii.read_webdataset_images(shards, backend="pandas").compute(scheduler="synchronous")
    arrays = frame.images.arrays()
    return {k: a.tobytes() for k, a in zip(frame["__key__"], arrays, strict=True)}


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


LABELS = pd.DataFrame({"cls": pd.array([0, 1, 2], "int64[pyarrow]"), "name": ["a", "b", "c"]})

OPERATIONS = {
    "filter": (lambda d: d[d.width > 200], None),
    "assign": (lambda d: d.assign(area=d.width * d.height), 24),
    "concat": (lambda d: dd.concat([d, d.partitions[:1]]), 32),
    "merge": (lambda d: d.merge(LABELS, on="cls"), 18),
    "merge of two collections": (
        lambda d: d.merge(d[["__key__", "txt"]].rename(columns={"txt": "t2"}), on="__key__"),
        24,
    ),
    "shuffle": (lambda d: d.shuffle("cls"), 24),
    "sort_values": (lambda d: d.sort_values("width", ascending=False), 24),
    "sort_values by text": (lambda d: d.sort_values("txt"), 24),
    "set_index": (lambda d: d.set_index("cls"), 24),
    "repartition to fewer": (lambda d: d.repartition(npartitions=2), 24),
    "repartition to more": (lambda d: d.repartition(npartitions=7), 24),
    "persist": (lambda d: d.persist(), 24),
    "sample": (lambda d: d.sample(frac=0.5, random_state=1), 12),
    "dropna": (lambda d: d.dropna(subset=["txt"]), 24),
    "drop_duplicates": (lambda d: dd.concat([d, d]).drop_duplicates(subset=["__key__"]), 24),
    "rename": (lambda d: d.rename(columns={"image": "picture"}), 24),
    "map_partitions": (lambda d: d.map_partitions(lambda part: part.iloc[::-1]), 24),
    "nlargest": (lambda d: d.nlargest(3, "width"), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_pixels_stay_with_their_keys_after(name, ddf, pixels):
    operation, rows = OPERATIONS[name]
    assert_pixels(operation(ddf).compute(), pixels, rows)


def test_head_and_tail_have_pixels(ddf, pixels):
    assert_pixels(ddf.head(3), pixels, 3)
    assert_pixels(ddf.tail(3), pixels, 3)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
def test_parquet_and_back(ddf, pixels, tmp_path):
    ddf.to_parquet(tmp_path)
    for options in ({}, {"dtype_backend": "pyarrow"}):
        assert_pixels(dd.read_parquet(tmp_path, **options).compute(), pixels, 24)
        assert_pixels(pd.read_parquet(tmp_path, **options), pixels, 24)


def test_metadata_can_be_grouped(ddf, photos):
    sizes = ddf.groupby("cls").size().compute().to_dict()
    assert sizes == pd.Series([photo.label for photo in photos]).value_counts().to_dict()
    widest = ddf.groupby("cls")["width"].max().compute().to_dict()
    assert widest == {
        label: max(p.pixels.shape[1] for p in photos if p.label == label) for label in range(4)
    }


def test_describe_is_that_of_pandas(ddf):
    got = ddf[["width", "nbytes"]].describe().compute()
    want = ddf[["width", "nbytes"]].compute().describe()
    for statistic in ("count", "mean", "std", "min", "max"):
        assert got.loc[statistic].tolist() == pytest.approx(want.loc[statistic].tolist())


def test_no_column_is_of_objects(ddf):
    assert "object" not in {str(dtype) for dtype in ddf.compute().dtypes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["filter", "merge", "shuffle", "sort_values", "repartition to fewer"]
)
def test_pixels_stay_with_their_keys_between_workers_after(name, client, ddf, pixels):
    operation, rows = OPERATIONS[name]
    persisted = client.persist(operation(ddf))
    assert_pixels(client.compute(persisted).result(), pixels, rows)


@pytest.mark.slow
def test_a_late_kind_of_member_warns_the_client_of_a_cluster(client, photos, tmp_path):
    from photo_shards import write_tar

    write_tar(tmp_path / "0.tar", {"a.jpg": photos[0].encoded})
    write_tar(tmp_path / "1.tar", {"b.jpg": photos[0].encoded, "b.another-kind": b"x"})
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    with pytest.warns(UserWarning, match="another-kind") as told:  # noqa: PT031
        client.compute(ddf).result()
        until(lambda: told)  # warnings of workers come through the scheduler


def assert_pixels(frame, pixels, rows=None):
    assert rows is None or len(frame) == rows
    assert len(frame)
    arrays = frame.images.arrays()
    for key, array in zip(frame["__key__"], arrays, strict=True):
        assert array.tobytes() == pixels[key]
