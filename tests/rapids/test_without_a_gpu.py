"""A client without a GPU builds collections for workers that have one."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contract import METADATA
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.frames import get_backend, gpus

pytestmark = pytest.mark.skipif(bool(gpus()), reason="needs a machine without a GPU")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 3, 4)


@pytest.fixture
def ddf(paths):
    with pytest.warns(UserWarning, match=r"no GPU.*to_backend"):
        return dii.read_webdataset_images(paths, backend="cudf", filters=[("width", ">=", 300)])


@pytest.fixture
def expected(paths):
    return dii.read_webdataset_images(paths, backend="pandas", filters=[("width", ">=", 300)])


def test_the_collection_is_built_with_its_columns_and_partitions(ddf, expected):
    assert type(ddf._meta).__module__.startswith("cudf")
    assert list(ddf.columns) == list(expected.columns)
    assert ddf.npartitions == 3
    assert ddf.partitions[1:].npartitions == 2
    narrow = ddf[["width", "image"]]
    assert list(narrow.columns) == ["width", "image"]
    assert len(narrow.optimize().__dask_graph__()) == 3


def test_columns_of_types_that_cudf_has_none_for_are_told(paths, tmp_path):
    (shard,) = write_shards(tmp_path, 1, 2)
    keys = {"key": ["0", "1"], "when": pa.nulls(2, pa.timestamp("us", "Europe/Berlin"))}
    sidecar = pa.table({**keys, "at": pa.nulls(2, pa.time32("s")), "n": [1, 2]})
    pq.write_table(sidecar, Path(shard).with_suffix(".parquet"))
    with pytest.warns(UserWarning, match=r"'at' \(time32\[ms\]\)"):
        ddf = dii.read_webdataset_images(shard, backend="cudf", sidecar="parquet")
    assert ddf._meta["when"].dtype == "datetime64[us]"
    assert "n" in ddf.columns
    assert "at" not in ddf.columns
    with (
        pytest.warns(UserWarning, match="no GPU"),
        pytest.raises(dii.ArgumentError, match=r"'json.at'.*time32\[s\]"),
    ):
        dii.read_webdataset_images(paths, backend="cudf", json_fields={"at": pa.time32("s")})


def test_late_decode_and_new_columns_are_planned(ddf):
    late = dii.decode_images(ddf[["__url__", "offset", "nbytes", "txt"]], size=32)
    assert list(late.columns) == ["__url__", "offset", "nbytes", "txt", "error", "image"]
    mapped = late.images.map_batches(len, {"score": "float32", "v": "list<float32>"})
    assert {n: str(t) for n, t in mapped.dtypes[-2:].items()} == {"score": "float32", "v": "list"}
    assert mapped.npartitions == 3
    pictures = ddf.images.map_batches(lambda images: images[:, ::2], {"image": "image"})
    assert list(pictures.columns) == list(ddf.columns)
    assert pictures._meta.dtypes.to_dict() == ddf._meta.dtypes.to_dict()
    assert ddf.images.channel_stats().npartitions == 1


ON_PANDAS = {
    "drop": lambda ddf: ddf.drop(columns="txt"),
    "rename": lambda ddf: ddf.rename(columns={"txt": "caption"}),
    "assign": lambda ddf: ddf.assign(split="train"),
    "merge": lambda ddf: ddf.merge(ddf[["__key__", "width"]], on="__key__"),
    "to_parquet": lambda ddf: ddf.to_parquet("out", compute=False),
    "stack": lambda ddf: ddf.images.stack((8, 8, 3)),
    "encode": lambda ddf: ddf.images.encode("png"),
    "thumbnails": lambda ddf: ddf.images.thumbnails(16),
    "vectors": lambda ddf: ddf.images.map_batches(len, {"v": "list<float32>"}).images.vectors("v"),
}


@pytest.mark.parametrize("name", ON_PANDAS)
def test_all_else_is_planned_behind_to_backend(ddf, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = ON_PANDAS[name](ddf.to_backend("pandas"))
    plan = plan.optimize() if hasattr(plan, "optimize") else plan
    assert len(plan.__dask_graph__()) >= 3


def test_results_are_planned_as_pandas(ddf, expected):
    as_pandas = ddf.to_backend("pandas")
    assert list(as_pandas.columns) == list(expected.columns)
    assert as_pandas._meta["image"].dtype == expected._meta["image"].dtype
    for columns in (["txt", "image"], ["txt"]):
        narrow = as_pandas[columns].optimize()
        assert narrow._meta.dtypes.to_dict() == as_pandas._meta[columns].dtypes.to_dict()


def test_the_plan_can_be_sent_to_a_scheduler(ddf):
    import pickle

    again = pickle.loads(pickle.dumps(ddf.to_backend("pandas")))
    assert list(again.columns) == list(ddf.columns)


def test_the_type_of_references_can_be_sent(ddf):
    import pickle

    import cudf

    dtype = cudf.StructDtype({"url": "str", "offset": "int64", "inner": cudf.ListDtype("str")})
    assert pickle.loads(pickle.dumps(dtype)) == dtype


def test_computing_here_is_an_error_that_says_what_is_possible(ddf):
    with pytest.raises(ImportError, match=r"workers.*backend='pandas'"):
        ddf.compute()
    with pytest.raises(ImportError, match="GPU"):
        ddf[["txt"]].compute()


def test_every_type_has_an_empty_column_without_a_gpu():
    meta = get_backend("cudf").meta(METADATA)
    assert {name: str(dtype) for name, dtype in meta.dtypes.items()} | {"npy": "list"} == {
        name: {
            "string": "str",
            "list<item: float>": "list",
            "binary": "list",
            "float": "float32",
        }.get(str(type_), str(type_))
        for name, type_ in METADATA.items()
    }
    assert str(meta.index.dtype) == "int64"


def test_an_empty_frame_is_an_empty_table_without_a_gpu():
    backend = get_backend("cudf")
    table = backend.to_arrow(backend.meta(METADATA))
    assert dict(zip(table.column_names, table.schema.types, strict=True)) == METADATA
    assert len(table) == 0
