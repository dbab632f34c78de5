"""``.images``: what each call gives, and that it reads no more than it must."""

from __future__ import annotations

import functools
import io

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from contract import BackendContract, images
from counted import work  # noqa: F401  a fixture
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.scan import samples as opening
from dask_image_ingest.frames import get_backend


@pytest.fixture
def sized(shards):
    return dii.read_webdataset_images(shards, size=(20, 30), backend="pandas")


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


@pytest.fixture(scope="module")
def with_a_gap(photos, tmp_path_factory):
    """Four photographs and, in the third place, a file that is no image."""
    from photo_shards import write_tar

    members = {f"{n}.{photos[n].extension}": photos[n].encoded for n in range(5)}
    members[f"2.{photos[2].extension}"] = b"no image"
    path = write_tar(tmp_path_factory.mktemp("gap") / "gap.tar", members)
    return dii.read_webdataset_images(path, size=16, backend="pandas")


def address(array):
    return array.__array_interface__["data"][0]


def mean(images):
    if isinstance(images, list):
        return np.array([image.mean() for image in images])
    return images.mean(axis=(1, 2, 3))


MEAN = {"mean": "float64"}


class TestStack:
    def test_lazy_is_one_chunk_per_partition_of_known_shape(self, sized):
        stacked = sized.images.stack()
        assert stacked.shape[1:] == (20, 30, 3)
        assert stacked.dtype == np.uint8
        assert stacked.numblocks == (3, 1, 1, 1)
        want = np.concatenate([np.stack(part.images.arrays()) for part in parts(sized)])
        np.testing.assert_array_equal(stacked.compute(), want)

    def test_means_are_those_of_numpy(self, sized):
        want = np.stack(sized.compute().images.arrays()).mean(axis=(0, 1, 2))
        np.testing.assert_allclose(sized.images.stack().mean(axis=(0, 1, 2)).compute(), want)

    @pytest.mark.parametrize("kept", [False, True])
    def test_partitions_whose_images_differ_are_refused(self, tmp_path, kept):
        """Each by itself could be stacked."""
        from photo_shards import encode, write_tar

        paths = []
        for number, size in enumerate([(20, 30), (40, 50)]):
            encoded = encode(Image.new("RGB", size), "png")
            images = {f"{number}{key}.png": encoded for key in "ab"}
            paths.append(write_tar(tmp_path / f"{number}.tar", images))
        ddf = dii.read_webdataset_images(paths, backend="pandas")
        ddf = ddf.persist() if kept else ddf
        told = r"partitions differ in shape, \(30, 20, 3\) and \(50, 40, 3\): read with size="
        with pytest.raises(dii.ArgumentError, match=told):
            ddf.images.stack().compute()
        with pytest.raises(dii.ArgumentError, match="partitions differ in shape"):
            ddf.images.stack().sum().compute()

    def test_a_decoded_partition_is_stacked_without_a_copy(self, sized):
        frame = sized.get_partition(0).compute()
        arrays, stacked = frame.images.arrays(), frame.images.stack()
        assert [address(image) for image in stacked] == [address(array) for array in arrays]
        assert not stacked.flags.owndata

    def test_what_does_not_lie_side_by_side_is_copied(self, sized):
        frame = sized.get_partition(0).compute()
        mixed = pd.concat([frame.iloc[4:], frame.iloc[:2]])
        want = np.stack(mixed.images.arrays())
        np.testing.assert_array_equal(mixed.images.stack(), want)

    def test_stacks_outlive_their_frame(self, sized):
        frame = sized.get_partition(0).compute()
        want = np.stack([array.copy() for array in frame.images.arrays()])
        stacked = frame.images.stack()
        del frame
        sized.get_partition(1).compute()
        np.testing.assert_array_equal(stacked, want)

    def test_shapes_that_differ_are_an_error_that_says_size(self, ddf):
        with pytest.raises(dii.ArgumentError, match=r"\(\d+, \d+, 3\) and .* size="):
            ddf.images.stack().compute()

    def test_a_missing_image_is_an_error_that_says_how_to_drop_it(self, with_a_gap):
        with pytest.raises(dii.ArgumentError, match=r"row 2 .* ddf\[ddf.error.isna\(\)\]"):
            with_a_gap.images.stack().compute()
        good = with_a_gap[with_a_gap.error.isna()]
        assert good.images.stack().compute().shape == (4, 16, 16, 3)

    def test_only_the_image_column_is_read(self, sized, work):  # noqa: F811
        sized.images.stack().sum().compute()
        assert work["decoded"] == 24

    def test_shapes_that_are_not_known_are_not_told(self, ddf, sized):
        assert np.isnan(ddf.images.stack().shape[1])
        small = sized.images.thumbnails(8, resize="crop").images.stack()
        assert np.isnan(small.shape[1])
        assert small.compute().shape == (24, 8, 8, 3)


class TestMapBatches:
    def test_numbers_strings_and_vectors_become_typed_columns(self, ddf):
        def describe(images):
            return {
                "mean": mean(images),
                "corner": np.array([image[0, 0] for image in images]),
                "shape": ["×".join(map(str, image.shape)) for image in images],
                "wide": np.array([image.shape[1] > 200 for image in images]),
            }

        outputs = {"mean": "float64", "corner": "list<uint8>", "shape": "string", "wide": bool}
        lazy = ddf.images.map_batches(describe, outputs, batch_size=3)
        frame, arrays = lazy.compute(), ddf.compute().images.arrays()
        assert lazy.dtypes.to_dict() == frame.dtypes.to_dict()
        assert "object" not in {str(dtype) for dtype in frame.dtypes}
        np.testing.assert_allclose(frame["mean"], [array.mean() for array in arrays])
        np.testing.assert_array_equal(
            frame.images.vectors("corner"), [array[0, 0] for array in arrays]
        )
        assert frame["shape"].tolist() == ["×".join(map(str, a.shape)) for a in arrays]
        assert frame["wide"].tolist() == (ddf.width > 200).compute().tolist()

    def test_lazy_is_eager_is_persisted(self, sized):
        lazy = sized.images.map_batches(mean, MEAN)
        persisted = sized.persist().images.map_batches(mean, MEAN)
        eager = sized.compute().images.map_batches(mean, MEAN)
        pd.testing.assert_frame_equal(lazy.compute(), eager)
        pd.testing.assert_frame_equal(persisted.compute(), eager)
        assert "image" not in eager.columns

    def test_rows_without_an_image_get_null_and_keep_their_place(self, with_a_gap):
        outputs = {"n": "int64", "v": "list<float32>", "s": "string"}
        frame = with_a_gap.images.map_batches(
            lambda x: {
                "n": np.arange(len(x)),
                "v": x[:, 0, 0].astype("float32"),
                "s": ["a"] * len(x),
            },
            outputs,
        ).compute()
        assert frame["n"].isna().tolist() == [False, False, True, False, False]
        assert frame["n"].dropna().tolist() == [0, 1, 2, 3]
        assert frame["v"].isna().equals(frame["n"].isna())
        assert frame["s"].isna().equals(frame["n"].isna())
        with pytest.raises(dii.ArgumentError, match="null"):
            frame.images.vectors("v")
        assert frame.dropna(subset=["v"]).images.vectors("v").shape == (4, 3)

    def test_batches_stay_in_their_partition_and_in_order(self, sized):
        sizes = []

        def count(images):
            sizes.append(len(images))
            return np.arange(len(images))

        frame = sized.images.map_batches(count, {"n": "int64"}, batch_size=5).compute()
        assert sizes == [5, 3] * 3
        assert frame["n"].tolist() == [*range(5), *range(3)] * 3

    def test_only_what_is_kept_is_read(self, ddf, work):  # noqa: F811
        mapped = ddf.images.map_batches(mean, MEAN)
        columns = mapped[["cls", "mean"]].optimize(fuse=False).expr
        (read,) = columns.find_operations(Scan)
        assert read.columns == ["cls", "image"]
        mapped[["cls", "txt"]].compute()
        assert len(mapped) == 24
        assert work["decoded"] == 0

    def test_filters_run_before_the_decode(self, ddf, work):  # noqa: F811
        seen = []
        mapped = ddf.images.map_batches(lambda x: seen.extend(x) or mean(x), MEAN)
        frame = mapped[mapped.width > 200].compute()
        assert 0 < len(frame) == work["decoded"] == len(seen) < 24
        bright = mapped[mapped["mean"] > 100].compute()
        assert work["decoded"] == len(frame) + 24
        assert (bright["mean"] > 100).all()

    def test_head_calls_with_as_many_images_as_it_shows(self, ddf, work):  # noqa: F811
        assert len(ddf.images.map_batches(mean, MEAN).head(3)) == 3
        assert work["decoded"] == 3

    @pytest.mark.parametrize("read", ["sized", "ddf"])
    def test_a_function_may_write_to_its_images_and_changes_no_frame(self, read, request):
        frames = request.getfixturevalue(read)
        want = [array.copy() for array in frames.compute().images.arrays()]

        def erase(images):
            for image in images:
                image[:] = 0
            return mean(images)

        persisted, eager = frames.persist(), frames.compute()
        for frame in (frames, persisted, eager):
            mapped = frame.images.map_batches(erase, MEAN, batch_size=5, keep_image=True)
            made = mapped if frame is eager else mapped.compute()
            assert made["mean"].tolist() == [0] * 24
            for kept in (made, eager, persisted.compute()):
                assert all(map(np.array_equal, kept.images.arrays(), want))

    def test_index_and_divisions_stay(self, sized):
        indexed = sized.persist().set_index("__key__", sorted=True)
        mapped = indexed.images.map_batches(mean, MEAN)
        assert mapped.divisions == indexed.divisions
        assert mapped.compute().index.tolist() == indexed.compute().index.tolist()

    def test_the_image_may_be_kept_and_any_column_replaced(self, sized):
        kept = sized.images.map_batches(mean, {"width": MEAN["mean"]}, keep_image=True)
        assert kept.columns.tolist() == [*sized.columns.drop("width"), "width"]
        eager = kept.compute()
        assert eager["width"].equals(sized.images.map_batches(mean, MEAN)["mean"].compute())
        assert len(eager.images.arrays()) == 24

    def test_what_does_not_fit_outputs_is_an_error_that_says_so(self, sized):
        for given, outputs, message in (
            (lambda x: np.zeros(len(x) - 1), MEAN, "first axis"),
            (lambda x: np.zeros((len(x), 4)), MEAN, "outputs= says float64"),
            (lambda x: np.zeros(len(x)), {"v": "list<float32>"}, "outputs= says list<float32>"),
            (lambda x: {"other": mean(x)}, MEAN, "gave a dict of 'other'"),
            (mean, {"a": "int8", "b": "int8"}, "give a dict"),
        ):
            with pytest.raises(dii.ArgumentError) as error:
                sized.images.map_batches(given, outputs).compute()
            assert message in str(error.value)

    def test_wrong_arguments_are_refused_at_the_call(self, sized):
        for options, message in (
            ({"outputs": {"a": "no-type"}}, "list<float32>"),
            ({"outputs": {}}, "outputs="),
            ({"outputs": MEAN, "batch_size": 0}, "batch_size=0"),
            ({"outputs": MEAN, "inputs": ["nothing"]}, "'nothing'"),
        ):
            with pytest.raises(dii.ArgumentError, match=message):
                sized.images.map_batches(mean, **options)


class Counting:
    """Stands for a model: says how often it was built in this process."""

    built = 0

    def __init__(self, add=0):
        type(self).built += 1
        self.number = type(self).built + add

    def __call__(self, images):
        return {"built": np.full(len(images), self.number), "pid": np.full(len(images), getpid())}


def getpid():
    import os

    return os.getpid()


def vector(images):
    return images.mean(axis=(1, 2)).astype("float32")


class TestVectors:
    """A column of embeddings survives what dataframes do."""

    @pytest.fixture
    def embedded(self, sized):
        return sized.images.map_batches(vector, {"v": "list<float32>"})

    @pytest.fixture
    def expected(self, sized):
        return np.stack([a.mean(axis=(0, 1)) for a in sized.compute().images.arrays()])

    def test_they_are_one_array_without_a_copy(self, embedded, expected):
        frame = embedded.compute()
        got = frame.images.vectors("v")
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        part = embedded.get_partition(0).compute()
        assert address(part.images.vectors("v")) == address(part.images.vectors("v"))

    def test_lazy_is_a_dask_array(self, embedded, expected):
        lazy = embedded.images.vectors("v")
        np.testing.assert_allclose(lazy.compute(), expected, rtol=1e-6)

    @pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
    def test_parquet_and_back(self, embedded, expected, tmp_path):
        embedded.to_parquet(tmp_path)
        for options in ({}, {"dtype_backend": "pyarrow"}):
            for frame in (
                dd.read_parquet(tmp_path, **options).compute(),
                pd.read_parquet(tmp_path, **options),
            ):
                np.testing.assert_allclose(frame.images.vectors("v"), expected, rtol=1e-6)
        assert str(dd.read_parquet(tmp_path).dtypes["v"]) == "list<float32>"

    @pytest.mark.slow
    def test_sort_filter_concat_and_merge(self, embedded, expected):
        frame = embedded.compute()
        other = dd.concat([embedded, embedded]).compute()
        np.testing.assert_allclose(other.images.vectors("v"), [*expected, *expected], rtol=1e-6)
        merged = embedded[["__key__", "v"]].merge(embedded[["__key__", "cls"]], on="__key__")
        assert str(merged.compute()["v"].dtype) == "list<float32>"
        ordered = embedded.sort_values("txt").compute()
        assert ordered["__key__"].tolist() == frame.sort_values("txt")["__key__"].tolist()
        assert len(embedded[embedded.v.notnull()]) == 24

    @pytest.mark.filterwarnings("ignore:The inplace keyword")
    def test_lists_in_json_fields_have_the_same_type(self, photos, tmp_path):
        from photo_shards import write_tar

        write_tar(tmp_path / "a.tar", {"a.jpg": photos[0].encoded, "a.json": b'{"box": [1, 2.5]}'})
        ddf = dii.read_webdataset_images(
            tmp_path, json_fields={"box": pa.list_(pa.float32())}, backend="pandas"
        )
        ddf[["json.box"]].to_parquet(tmp_path / "out")
        assert dd.read_parquet(tmp_path / "out").compute()["json.box"].iloc[0] == [1, 2.5]

    def test_what_are_no_vectors_is_said(self, embedded):
        for column in ("cls", "nothing"):
            with pytest.raises(dii.ArgumentError, match=column):
                embedded.compute().images.vectors(column)


class TestStatistics:
    @pytest.mark.slow
    def test_they_are_exactly_those_of_numpy(self, ddf):
        pixels = np.concatenate([a.reshape(-1, 3) for a in ddf.compute().images.arrays()])
        lazy, eager = ddf.images.channel_stats(), ddf.compute().images.channel_stats()
        for statistics in (lazy.compute(), eager):
            assert statistics.index.tolist() == [0, 1, 2]
            np.testing.assert_allclose(statistics["mean"], pixels.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(statistics["std"], pixels.std(axis=0), rtol=1e-10)
            assert statistics["min"].tolist() == pixels.min(axis=0).tolist()
            assert statistics["max"].tolist() == pixels.max(axis=0).tolist()
            assert statistics["pixels"].tolist() == [len(pixels)] * 3

    def test_a_small_deviation_of_many_pixels_is_not_lost(self):
        backend = get_backend("pandas")
        flat = np.full((1000, 1000, 3), 254, np.uint8)
        flat[0, 0] = 255
        frame = TestPandasContract().make(backend, [flat] * 3)
        statistics = frame.images.channel_stats()
        np.testing.assert_allclose(statistics["std"], np.std(flat[:, :, 0]), rtol=1e-9)

    def test_rows_without_an_image_count_for_nothing(self, with_a_gap):
        statistics = with_a_gap.images.channel_stats().compute()
        assert statistics["pixels"].tolist() == [4 * 16 * 16] * 3

    def test_nothing_has_no_statistics(self, ddf):
        assert len(ddf[ddf.width > 10_000].images.channel_stats().compute()) == 0


class TestPandasContract(BackendContract):
    """Of the contract only what makes frames."""

    __test__ = False


class TestSmallImages:
    def test_they_are_those_of_a_read_with_size(self, ddf, shards):
        small = ddf.images.thumbnails(24).compute()
        want = dii.read_webdataset_images(shards, size=24, resize="longer", backend="pandas")
        for got, image in zip(small.images.arrays(), want.compute().images.arrays(), strict=True):
            assert max(got.shape) == 24
            assert abs(got.astype(int) - image).mean() < 1
        assert small.columns.tolist() == ddf.columns.tolist()

    def test_missing_images_stay_missing(self, with_a_gap):
        small = with_a_gap.compute().images.thumbnails(8, resize="crop").images.arrays()
        assert [None if a is None else a.shape for a in small] == [
            (8, 8, 3),
            (8, 8, 3),
            None,
            (8, 8, 3),
            (8, 8, 3),
        ]

    @pytest.mark.parametrize("format", ["jpeg", "png", "webp"])
    def test_encoded_images_are_files_of_that_format(self, with_a_gap, format):
        files = with_a_gap.images.encode(format).compute()
        arrays = with_a_gap.compute().images.arrays()
        assert files.isna().tolist() == [False, False, True, False, False]
        for data, array in zip(files, arrays, strict=True):
            if array is not None:
                with Image.open(io.BytesIO(data)) as image:
                    assert image.format == format.upper()
                    difference = np.asarray(image).astype(int) - array
                assert abs(difference).mean() <= (0 if format == "png" else 6)

    def test_unknown_formats_and_qualities_are_refused(self, ddf):
        with pytest.raises(dii.ArgumentError, match="tiff"):
            ddf.images.encode("tiff")
        with pytest.raises(dii.ArgumentError, match="quality"):
            ddf.images.encode(quality=101)


def test_the_accessor_finds_the_column_after_a_rename_and_a_merge(sized):
    renamed = sized.rename(columns={"image": "picture"})
    assert renamed.images.column == "picture"
    assert renamed.images.stack().compute().shape == (24, 20, 30, 3)
    twice = sized[["__key__", "image"]].merge(renamed[["__key__", "picture"]], on="__key__")
    assert twice.images.column == "image"
    assert twice.images["picture"].stack().compute().shape == (24, 20, 30, 3)
    other = twice.rename(columns={"image": "photo"})
    with pytest.raises(dii.ArgumentError, match="'photo', 'picture'"):
        other.images.stack()
    with pytest.raises(dii.ArgumentError, match="no column of images"):
        sized[["txt"]].images.stack()


def test_calls_on_every_backend_have_the_same_shapes():
    frame = TestPandasContract().make(get_backend("pandas"))
    present = [array for array in images() if array is not None]
    batch = frame.images.map_batches(lambda x: np.array([i.size for i in x]), {"size": "int64"})
    assert batch["size"].dropna().tolist() == [array.size for array in present]


def test_the_head_of_metadata_decodes_nothing_and_reads_one_shard(ddf, work, monkeypatch):  # noqa: F811
    opened = []
    index_tar = opening.index_tar
    monkeypatch.setattr(
        opening, "index_tar", lambda b, url, *a: opened.append(url) or index_tar(b, url, *a)
    )
    assert len(ddf[["txt", "width"]].head(3)) == 3
    assert len(ddf["txt"].head(3)) == 3
    assert work["decoded"] == 0
    assert len(opened) == 2


def parts(ddf):
    return [ddf.get_partition(number).compute() for number in range(ddf.npartitions)]


@pytest.mark.slow
def test_a_class_is_built_once_in_each_worker_process(client, sized):
    outputs = {"built": "int64", "pid": "int64"}
    for model, built in ((Counting, 1), (functools.partial(Counting, add=10), 12)):
        mapped = sized.images.map_batches(model, outputs, batch_size=2)
        frame = client.compute(mapped).result()
        assert set(frame["built"]) == {built}
        assert set(frame["pid"]) <= set(client.run(getpid).values())


def test_vectors_of_partitions_that_differ_are_refused():
    parts = [pd.DataFrame({"v": [[1.0] * length] * 2}) for length in (3, 4)]
    parts = [part.astype({"v": "list<float32>"}) for part in parts]
    ddf = dd.from_map(lambda part: parts[part], [0, 1], meta=parts[0].iloc[:0])
    with pytest.raises(dii.ArgumentError, match="'v' differ in length, 3 in one partition and 4"):
        ddf.images.vectors("v").compute()


@pytest.mark.slow
def test_vectors_are_shuffled_between_workers(client, sized):
    shuffled = sized.images.map_batches(vector, {"v": "list<float32>"}).shuffle("cls")
    got = client.compute(client.persist(shuffled)).result()
    want = sized.compute().images.map_batches(vector, {"v": "list<float32>"})
    assert str(got["v"].dtype) == "list<float32>"
    got, want = (frame.sort_values("__key__").images.vectors("v") for frame in (got, want))
    np.testing.assert_array_equal(got, want)
