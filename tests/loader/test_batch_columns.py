"""The form of a column in a batch follows from its type, and is the same in all batches."""

from __future__ import annotations

import io
import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.frames import pandas_type, parse_type

# dask's own call of pandas 3.1
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")

BOXES = [[[0, 0, 4, 4]], [], [[0, 0, 9, 9], [1, 1, 5, 5]], [[2, 2, 3, 3]]]
NAMES = [["cat"], [], ["dog", "cat"], None]
TOKENS = [[1, 2, 3], [4], [], [5, 6]]


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def detection(tmp_path_factory):
    """Two shards of two images with boxes, names of classes and tokens."""
    folder = tmp_path_factory.mktemp("detection")
    for shard in range(2):
        members = {}
        for row in (2 * shard, 2 * shard + 1):
            pixels = np.full((8 + row, 8, 3), row, np.uint8)
            members[f"{row}.png"] = png(pixels)
            fields = {"boxes": BOXES[row], "names": NAMES[row], "tokens": TOKENS[row]}
            fields["at"] = {"x": row, "seen": [row] * row}
            members[f"{row}.json"] = json.dumps(fields).encode()
        write_tar(folder / f"{shard}.tar", members)
    return folder


FIELDS = {
    "boxes": "list<list<float32>>",
    "names": "list<string>",
    "tokens": "list<int32>",
    "at": "struct<x: int64, seen: list<int64>>",
}


@pytest.fixture
def ddf(detection):
    return dii.read_webdataset_images(detection, json_fields=FIELDS, backend="pandas")


def joined(batches, name):
    return [row for batch in batches for row in batch[name]]


def series(values, type_):
    type_ = parse_type(type_)
    return pd.Series(pandas_type(type_).__from_arrow__(pa.array(values, type_)))


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("shuffle", [None, 0])
def test_ragged_columns_are_lists_with_one_value_for_each_row(ddf, size, shuffle):
    names = ["__key__", *(f"json.{name}" for name in FIELDS)]
    batches = list(ddf.images.iter_batches(size, columns=names, shuffle=shuffle))
    rows = [int(key) for key in joined(batches, "__key__")]
    assert sorted(rows) == [0, 1, 2, 3]
    assert {type(batch[name]) for batch in batches for name in names[1:]} == {list}
    boxes = joined(batches, "json.boxes")
    assert [each.tolist() for each in boxes] == [BOXES[row] for row in rows]
    assert [each.shape[0] for each in boxes] == [len(BOXES[row]) for row in rows]
    assert {each.dtype for each in boxes} == {np.dtype("float32")}
    tokens = joined(batches, "json.tokens")
    assert [each.tolist() for each in tokens] == [TOKENS[row] for row in rows]
    assert {each.dtype for each in tokens} == {np.dtype("int32")}
    assert joined(batches, "json.names") == [NAMES[row] for row in rows]
    for row, at in zip(rows, joined(batches, "json.at"), strict=True):
        assert (at["x"], at["seen"].tolist()) == (row, [row] * row)


def test_lists_of_one_length_stay_lists():
    frame = pd.DataFrame({"v": series([[1.0, 2.0], [3.0, 4.0]], "list<float32>")})
    ((one, other),) = (batch["v"] for batch in frame.images.iter_batches(2))
    assert (one.tolist(), other.tolist()) == ([1, 2], [3, 4])


def test_lists_of_a_fixed_length_inside_lists_are_arrays_of_that_width():
    boxes = series(BOXES, "list<float32[4]>")
    for batch in pd.DataFrame({"boxes": boxes}).images.iter_batches(1):
        assert batch["boxes"][0].shape[1:] == (4,)


@pytest.mark.parametrize("type_", ["float16[2, 3]", "int64[5]", "uint8[2, 1, 2]", "float32[1]"])
def test_arrays_of_one_shape_are_one_array_after_parquet(type_, tmp_path, rng):
    kind, shape = type_[:-1].split("[")
    shape = tuple(int(edge) for edge in shape.split(","))
    values = np.array([rng.randrange(2) for _ in range(7 * np.prod(shape))], kind)
    values = values.reshape(7, *shape)
    frame = pd.DataFrame({"key": range(7), "v": pd.Series(list(values)).astype(type_)})
    dd.from_pandas(frame, npartitions=3).to_parquet(tmp_path / "a")
    lazy = dd.read_parquet(tmp_path / "a")
    assert str(lazy.dtypes["v"]) == type_
    batches = list(lazy.images.iter_batches(3, shuffle=0))
    assert [batch["v"].shape for batch in batches] == [(3, *shape), (3, *shape), (1, *shape)]
    for batch in batches:
        assert batch["v"].dtype == kind
        np.testing.assert_array_equal(batch["v"], values[batch["key"]])
    # Other readers know the shape.
    type_ = pq.read_schema(next((tmp_path / "a").glob("*.parquet"))).field("v").type
    for length in shape:
        assert type_.list_size == length
        type_ = type_.value_type


@pytest.mark.parametrize("type_", [pa.list_(pa.float32()), pa.list_(pa.float32(), 3)])
def test_embeddings_of_another_writer_get_a_shape_by_astype(type_, tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    pq.write_table(pa.table({"v": pa.array(values.tolist(), type_)}), tmp_path / "a.parquet")
    lazy = dd.read_parquet(tmp_path / "a.parquet")
    (batch,) = lazy.images.iter_batches(4)
    assert [row.tolist() for row in batch["v"]] == values.tolist()
    (batch,) = lazy.astype({"v": "float32[3]"}).images.iter_batches(4)
    np.testing.assert_array_equal(batch["v"], values)
    with pytest.raises(ValueError, match=r"float32\[4\] takes arrays of shape \(4,\)"):
        next(lazy.astype({"v": "float32[4]"}).images.iter_batches(4))


def test_arrays_of_a_shape_are_members_and_fields_of_json(tmp_path):
    members = {}
    for row, array in enumerate([np.ones((2, 3)), np.zeros((2, 3)), np.zeros((3, 2))]):
        file = io.BytesIO()
        np.save(file, array.astype("float16"))
        fields = {"boxes": BOXES[row], "mean": [row, 0.5], "bad": [0] * (3 - row)}
        members |= {f"{row}.npy": file.getvalue(), f"{row}.json": json.dumps(fields).encode()}
        members[f"{row}.png"] = png(np.zeros((4, 4, 3), np.uint8))
    write_tar(tmp_path / "a.tar", members)
    ddf = dii.read_webdataset_images(
        tmp_path / "a.tar",
        members={"npy": "float16[2, 3]"},
        json_fields={"boxes": "list<float32[4]>", "mean": "float32[2]", "bad": "int8[2]"},
        backend="pandas",
    )
    with pytest.warns(UserWarning, match="npy|json.bad"):
        frame = ddf.compute()
    assert frame["npy"].isna().tolist() == [False, False, True]  # of another shape
    assert frame["json.bad"].isna().tolist() == [True, False, True]
    good = frame[frame["npy"].notna()][["npy", "json.boxes", "json.mean"]]
    (batch,) = good.images.iter_batches(2)
    assert batch["npy"].mean(axis=(1, 2)).tolist() == [1, 0]
    assert [boxes.shape for boxes in batch["json.boxes"]] == [(1, 4), (0, 4)]
    assert batch["json.mean"].tolist() == [[0, 0.5], [1, 0.5]]


def test_latents_are_exported_as_npy(ddf, tmp_path):
    latents = ddf.images.map_batches(
        lambda images: [np.full((2, 1), len(image), "float16") for image in images],
        {"latent": "float16[2, 1]"},
        keep_image=True,
    )
    dii.to_webdataset(latents, tmp_path / "{shard}.tar", members=["png", {"lat.npy": "latent"}])
    made = dii.read_webdataset_images(
        tmp_path, members={"lat.npy": "float16[2, 1]"}, backend="pandas"
    )
    (batch,) = made.images.iter_batches(4, columns=["lat.npy"])
    assert batch["lat.npy"][:, 0, 0].tolist() == [8, 9, 10, 11]


def test_lists_of_fixed_size_of_image_files_in_parquet_have_their_shape(tmp_path):
    type_ = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = {"bytes": png(np.zeros((4, 4, 3), np.uint8)), "path": "a.png"}
    columns = {"image": pa.array([image] * 2, type_)}
    columns["v"] = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float32(), 3))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    ddf = dii.read_parquet_images(tmp_path / "a.parquet", image="image", backend="pandas")
    (batch,) = ddf.images.iter_batches(2, columns=["v"])
    assert batch["v"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_tensors_reach_the_trainer_from_workers(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    values = pd.Series(list(np.arange(10, dtype="float32").reshape(5, 2))).astype("float32[2]")
    ragged = series([[1] * row for row in range(5)], "list<int32>")
    nested = series([{"x": [0.5] * row} for row in range(5)], "struct<x: list<float32>>")
    frame = pd.DataFrame({"key": range(5), "v": values, "r": ragged, "s": nested})
    dd.from_pandas(frame, npartitions=2).to_parquet(tmp_path / "a")
    lazy = dd.read_parquet(tmp_path / "a")
    keys = []
    for batch in lazy.images.dataloader(2, shuffle=0, num_workers=2):
        keys += batch["key"].tolist()
        for key, row, value, fields in zip(*(batch[name] for name in frame), strict=True):
            assert row.tolist() == [2 * key, 2 * key + 1]
            assert value.dtype == torch.int32
            assert value.tolist() == [1] * key
            assert fields["x"].tolist() == [0.5] * key
    assert sorted(keys) == list(range(5))


def test_latents_of_images_are_written_and_read_in_their_shape(ddf, tmp_path):
    def encode(images):
        return [np.full((4, 2, 2), image[0, 0, 0], "float16") for image in images]

    latents = ddf.images.map_batches(encode, {"latent": "float16[4, 2, 2]"})
    assert latents.images.vectors("latent").shape[1:] == (4, 2, 2)
    latents[["__key__", "latent"]].to_parquet(tmp_path / "latents")
    for batch in dd.read_parquet(tmp_path / "latents").images.iter_batches(2, shuffle=1):
        assert batch["latent"].shape == (2, 4, 2, 2)
        assert batch["latent"].dtype == np.float16
        assert batch["latent"][:, 0, 0, 0].tolist() == [int(key) for key in batch["__key__"]]


@pytest.mark.parametrize("shuffle", [None, 0])
def test_values_that_a_declared_dtype_has_not_are_an_error(ddf, shuffle):
    for values, dtype, told in (
        ([0, 1, None, 1], "int64", "has nulls"),
        ([True, False, True, None], "bool", "has nulls"),
        ([0, 1, 1, 2.5], "int64", r"is declared as int64, and has 2\.5"),
        ([0, 1, "a", 1], "int64", "is declared as int64, and has 'a'"),
    ):
        labels = ddf["__key__"].map(dict(zip("0123", values, strict=True)), meta=("label", dtype))
        batches = ddf.assign(label=labels).images.iter_batches(
            2, columns=["label"], shuffle=shuffle
        )
        with pytest.raises(dii.ArgumentError, match=f"'label' {told}"):
            list(batches)


@pytest.mark.parametrize("shuffle", [None, 0])
def test_a_column_has_one_dtype_in_all_batches(ddf, shuffle):
    # Without the row, the partition of it still has floats.
    labels = ddf["__key__"].map({"0": 0, "1": 1, "2": 2}, meta=("label", "int64"))
    good = ddf.assign(label=labels)[labels.notnull()]
    batches = list(good.images.iter_batches(1, columns=["label"], shuffle=shuffle))
    assert {batch["label"].dtype for batch in batches} == {np.dtype("int64")}
    assert sorted(joined(batches, "label")) == [0, 1, 2]


def test_nulls_among_whole_numbers_of_a_list_are_an_error():
    frame = pd.DataFrame({"v": series([[1], [2, None]], "list<int64>")})
    with pytest.raises(dii.ArgumentError, match="list of column 'v' has nulls"):
        next(frame.images.iter_batches(2))
    floats = pd.DataFrame({"v": series([[1], [2, None]], "list<float32>")})
    assert np.isnan(next(floats.images.iter_batches(2))["v"][1][1])


def test_a_null_array_of_one_shape_is_an_error():
    frame = pd.DataFrame({"v": pd.Series([np.zeros(2), None]).astype("float32[2]")})
    with pytest.raises(dii.ArgumentError, match="'v' has nulls"):
        next(frame.images.iter_batches(2))


def test_mixed_frames_have_the_dtype_of_both(ddf):
    small = ddf.assign(label=ddf["__key__"].map(int, meta=("label", "int32")).astype("int32"))
    large = ddf.assign(label=ddf["__key__"].map(int, meta=("label", "int64")).astype("int64"))
    batches = dii.mix_batches([small, large], 2, weights=[1, 1], columns=["label"])
    assert {batch["label"].dtype for batch in batches} == {np.dtype("int64")}


def test_rows_without_images_are_resumed_and_shared(tmp_path):
    frame = pd.DataFrame({"id": range(20), "v": pd.Series([np.ones(2)] * 20).astype("float32[2]")})
    dd.from_pandas(frame, npartitions=4).to_parquet(tmp_path / "a")
    lazy = dd.read_parquet(tmp_path / "a")
    batches = lazy.images.iter_batches(3, shuffle=5)
    assert len(batches) == 7
    seen = [next(batches)["id"] for _ in range(2)]
    rest = lazy.images.iter_batches(3, shuffle=5, start=batches.position)
    seen += [batch["id"] for batch in rest]
    assert sorted(np.concatenate(seen).tolist()) == list(range(20))
    ranks = [lazy.images.iter_batches(2, shuffle=5, shard=(rank, 2)) for rank in range(2)]
    ids = [batch["id"] for rank in ranks for batch in rank]
    assert sorted(np.concatenate(ids).tolist()) == list(range(20))


def test_raw_images_are_batches_of_their_dtype(tmp_path):
    depth = np.arange(64, dtype=np.uint16).reshape(8, 8) * 900
    write_tar(tmp_path / "a.tar", {f"{row}.png": png(depth + row) for row in range(3)})
    raw = dii.read_webdataset_images(tmp_path / "a.tar", mode="raw", backend="pandas")
    for shuffle in (None, 0):
        (batch,) = raw.images.iter_batches(3, columns=["__key__"], shuffle=shuffle)
        assert batch["image"].dtype == np.uint16
        for image, key in zip(batch["image"], batch["__key__"], strict=True):
            np.testing.assert_array_equal(image[..., 0], depth + int(key))


class TestCollate:
    """Functions that a user passes as ``collate_fn``, as the guide shows them."""

    def test_boxes_are_flipped_with_their_image(self, ddf):
        def flipped(rows):
            images, targets = [], []
            for row in rows:
                image, boxes = row["image"][:, ::-1], row["json.boxes"].reshape(-1, 4)
                width = image.shape[1]
                images.append(image)
                targets.append(
                    np.stack(
                        [width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], axis=1
                    )
                )
            return images, targets  # fmt: skip

        batches = ddf.images.iter_batches(3, columns=["json.boxes"], collate_fn=flipped)
        images, targets = zip(*batches, strict=True)
        assert [len(each) for each in images] == [3, 1]
        got = [boxes.tolist() for batch in targets for boxes in batch]
        assert got == [[[8 - x2, y1, 8 - x1, y2] for x1, y1, x2, y2 in each] for each in BOXES]

    def test_tokens_are_padded(self, ddf):
        def padded(rows):
            longest = max(len(row["json.tokens"]) for row in rows)
            tokens = np.zeros((len(rows), longest), np.int32)
            for number, row in enumerate(rows):
                tokens[number, : len(row["json.tokens"])] = row["json.tokens"]
            return {"tokens": tokens, "mask": tokens > 0}

        (batch,) = ddf.images.iter_batches(4, columns=["json.tokens"], collate_fn=padded)
        assert batch["tokens"].tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]]

    def test_images_of_differing_sizes_are_padded(self, ddf):
        def padded(rows):
            edges = np.array([row["image"].shape for row in rows]).max(axis=0)
            images = np.zeros((len(rows), *edges), np.uint8)
            for image, row in zip(images, rows, strict=True):
                height, width, _ = row["image"].shape
                image[:height, :width] = row["image"]
            return images

        (images,) = ddf.images.iter_batches(4, columns=[], collate_fn=padded)
        assert images.shape == (4, 11, 8, 3)
        assert [image.max() for image in images] == [0, 1, 2, 3]
