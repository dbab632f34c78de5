"""Images in parquet files, as other tools write them, are the frame that a read of shards gives."""

import functools
import io
import tarfile
from pathlib import Path

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus import save
from counted import work  # noqa: F401
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.dataset import parquet_images as module

# Dask's own call of pandas 3.1.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ROWS = 14  # the last two of them bad


@pytest.fixture(autouse=True)
def threads():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(autouse=True)
def many_partitions(monkeypatch, encoded):
    """Each row group a partition: they are far smaller than what a partition takes."""
    monkeypatch.setattr(module, "MOST_ENCODED", sum(len(data or b"") for data in encoded) * 2 // 5)


@pytest.fixture(scope="module")
def encoded(photos):
    images = [photo.encoded for photo in photos[:12]]
    return [*images, images[0][:-200], None]


def write(path, encoded, kind="struct", **columns):
    """As ``datasets`` and others have them: 14 rows, in row groups of 5."""
    if kind == "struct":
        values = [{"bytes": data, "path": f"{n}.jpg"} for n, data in enumerate(encoded)]
        image = pa.array(values, STRUCT)
    else:
        image = pa.array(encoded, kind)
    count = len(encoded)
    table = {
        "image": image,
        "label": np.arange(count) // 5,
        "caption": [f"c{n}" for n in range(count)],
    }
    pq.write_table(pa.table({**table, **columns}), path, row_group_size=5)
    return path


@pytest.fixture(scope="module")
def file(encoded, tmp_path_factory):
    return write(tmp_path_factory.mktemp("parquet") / "train-00000.parquet", encoded)


@pytest.mark.parametrize("kind", ["struct", "binary", "large_binary"])
def test_pixels_errors_and_headers_are_those_of_pillow(kind, encoded, photos, tmp_path):
    path = write(tmp_path / "a.parquet", encoded, kind)
    ddf = dii.read_parquet_images(path, backend="pandas")
    assert ddf.npartitions == 3
    frame = ddf.compute()
    assert frame.caption.tolist() == [f"c{n}" for n in range(ROWS)]
    for array, photo in zip(frame.images.arrays()[:12], photos, strict=False):
        assert array.shape == photo.pixels.shape
        assert np.abs(array.astype(int) - photo.pixels).mean() < 1
    assert frame.error[:12].isna().all()
    assert [error.partition(":")[0] for error in frame.error[12:]] == ["truncated", "missing"]
    for number, (_, row) in enumerate(frame[:12].iterrows()):
        with Image.open(io.BytesIO(encoded[number])) as picture:
            assert (row.width, row.height) == picture.size
            assert row.format == picture.format.lower()
            assert row.channels == len(picture.getbands())
        assert row["nbytes"] == len(encoded[number])
    assert pd.isna(frame.width.iloc[13])
    assert frame["__key__"].tolist() == [f"a/{number:08}" for number in range(ROWS)]
    assert set(frame["__url__"]) == {str(path)}
    assert frame.dtypes.equals(ddf.dtypes)
    assert frame.height.dtype == "int32[pyarrow]"


def test_only_what_a_query_needs_is_read_and_decoded(file, work, tmp_path):  # noqa: F811
    damaged = tmp_path / "damaged.parquet"
    content = bytearray(file.read_bytes())
    for group in range(3):
        # The image column of every row group is destroyed: whoever reads it fails.
        chunk = pq.ParquetFile(file).metadata.row_group(group).column(0)
        assert chunk.path_in_schema == "image.bytes"
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    damaged.write_bytes(content)
    ddf = dii.read_parquet_images(damaged, backend="pandas")
    assert len(ddf) == ROWS
    assert ddf[["caption"]].compute().caption.tolist() == [f"c{n}" for n in range(ROWS)]
    assert ddf[ddf.label > 1].caption.compute().tolist() == ["c10", "c11", "c12", "c13"]
    with pytest.raises(dii.ShardError, match=r"damaged.parquet cannot be read"):
        ddf.compute()
    assert work["decoded"] == 0


def test_row_groups_are_pruned_by_filters(file, work, tmp_path):  # noqa: F811
    pruned = tmp_path / "damaged.parquet"
    content = bytearray(file.read_bytes())
    for group in (0, 2):
        chunk = pq.ParquetFile(file).metadata.row_group(group).column(0)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    pruned.write_bytes(content)
    filters = [("label", "==", 1), ("caption", "!=", "c7")]
    frame = dii.read_parquet_images(pruned, backend="pandas", filters=filters).compute()
    assert frame.caption.tolist() == ["c5", "c6", "c8", "c9"]
    assert work["decoded"] == 4


def test_filters_run_before_the_decode_and_headers_decode_nothing(file, work):  # noqa: F811
    ddf = dii.read_parquet_images(file, backend="pandas")
    widths = ddf.width.compute()
    assert work["decoded"] == 0
    kept = ddf[ddf.width > 200].compute()
    assert len(kept) == (widths > 200).sum() == work["decoded"] > 0
    assert len(ddf[ddf.caption == "c3"].compute()) == 1
    assert work["decoded"] == len(kept) + 1


def test_partitions_of_images_are_not_put_together_by_dask(encoded, tmp_path):
    """Dask would, where few of many columns are read: by their number, not by their size."""
    extra = {f"n{n}": np.arange(ROWS) for n in range(40)}
    ddf = dii.read_parquet_images(write(tmp_path / "a.parquet", encoded, **extra), backend="pandas")
    assert ddf[["image"]].optimize().npartitions == 3
    assert ddf[["width"]].optimize().npartitions == 3


def test_columns_are_chosen_and_ordered(file):
    ddf = dii.read_parquet_images(file, backend="pandas", columns=["width", "caption", "image"])
    assert list(ddf.columns) == ["width", "caption", "image"]
    assert list(ddf.compute().columns) == ["width", "caption", "image"]
    full = dii.read_parquet_images(file, backend="pandas")
    behind = ["error", "nbytes", "format", "height", "width", "channels"]
    assert list(full.columns) == ["__key__", "__url__", "image", "label", "caption", *behind]


def test_columns_of_the_file_keep_their_names(encoded, tmp_path):
    path = write(tmp_path / "a.parquet", encoded, width=["wide"] * ROWS, error=["x"] * ROWS)
    with pytest.raises(dii.ArgumentError, match="column 'error' of their own"):
        dii.read_parquet_images(path, backend="pandas")
    ddf = dii.read_parquet_images(path, backend="pandas", columns=["image", "width", "height"])
    frame = ddf.compute()
    assert set(frame.width) == {"wide"}
    assert frame.height[:12].notna().all()
    references = dii.read_parquet_images(path, backend="pandas", decode=False)
    assert set(references.error.compute()) == {"x"}


def test_a_table_with_locations_is_exported_when_its_shards_are_gone(photos, tmp_path):
    """Its bytes are its own: what it says of where they came from is kept under other names."""
    members = {f"{n}.{photo.extension}": photo.encoded for n, photo in enumerate(photos[:3])}
    shard = write_tar(tmp_path / "a.tar", members)
    dii.to_parquet_images(dii.read_webdataset_images(shard, decode=False), tmp_path / "table")
    table = dii.read_parquet_images(tmp_path / "table", backend="pandas")
    Path(shard).unlink()
    frame = table.compute()
    assert frame["table.__url__"].tolist() == [str(shard)] * 3
    sizes = [len(data) for data in members.values()]
    assert frame.nbytes.tolist() == frame["table.nbytes"].tolist() == sizes
    assert set(frame["__url__"]) == {str(tmp_path / "table" / "part.0.parquet")}
    dii.to_webdataset(table, f"{tmp_path}/again/{{shard}}.tar")
    with tarfile.open(tmp_path / "again" / "0.tar") as tar:
        assert {each.name: tar.extractfile(each).read() for each in tar} == members


@pytest.mark.parametrize("errors", ["drop", "raise"])
def test_bad_images_are_dropped_or_raised(errors, file):
    ddf = dii.read_parquet_images(file, backend="pandas", errors=errors)
    if errors == "drop":
        assert len(ddf) == 12
        assert len(ddf.compute()) == 12
    else:
        with pytest.raises(
            dii.ImageDecodeError,
            match=r"parquet: the image of sample '[^']*00000012'.*trunc",
        ):
            ddf.compute()


def test_references_carry_the_bytes_through_parquet(file, tmp_path):
    references = dii.read_parquet_images(file, backend="pandas", decode=False)
    assert "error" not in references.columns
    expected = dii.read_parquet_images(file, backend="pandas").compute()
    stored = references.compute()
    stored.to_parquet(tmp_path / "stored.parquet")
    again = dii.decode_images(pd.read_parquet(tmp_path / "stored.parquet"))
    assert again.error.fillna("").tolist() == expected.error.fillna("").tolist()
    for one, other in zip(again.images.arrays(), expected.images.arrays(), strict=True):
        assert np.array_equal(one, other) if one is not None else other is None


def test_operations_of_images_work(file, tmp_path):
    ddf = dii.read_parquet_images(file, backend="pandas", size=32)
    good = ddf[ddf.error.isna()]
    assert good.images.stack().compute().shape == (12, 32, 32, 3)
    means = good.images.map_batches(lambda x: x.mean(axis=(1, 2, 3)), {"mean": "float32"})
    assert means["mean"].compute().notna().all()
    batches = list(good[["image", "label"]].images.iter_batches(5))
    assert sum(len(batch["label"]) for batch in batches) == 12
    assert len(dii.gallery(ddf, tmp_path / "page.html")) == ROWS
    assert len(ddf.images.show(20)) == ROWS


def test_rows_are_decoded_after_a_shuffle(file, work):  # noqa: F811
    ddf = dii.read_parquet_images(file, backend="pandas")
    frame = ddf.sort_values("caption", ascending=False).head(2)
    assert frame.caption.tolist() == ["c9", "c8"]
    assert frame.image.notna().all()


@pytest.fixture
def scenes(photos, tmp_path):
    """Two files of photographs with masks, a third of which are missing, and names."""
    random = np.random.default_rng(0)
    labels = [random.integers(0, 5, photo.pixels.shape[:2], np.uint8) for photo in photos[:18]]
    masks = [None if n % 3 == 2 else save(Image.fromarray(a), "PNG") for n, a in enumerate(labels)]
    for part in range(2):
        rows = range(9 * part, 9 * part + 9)
        write(
            tmp_path / f"{part}.parquet",
            [photos[n].encoded for n in rows],
            seg=pa.array([masks[n] for n in rows], pa.binary()),
            name=[f"scene {n}" for n in rows],
        )
    return tmp_path, labels


IMAGES = {"image": "image", "mask": dii.ImageColumn("seg", mode="labels")}


def test_several_image_columns_are_read_at_once(scenes, photos, work):  # noqa: F811
    folder, labels = scenes
    ddf = dii.read_parquet_images(folder, image=IMAGES, key="name", backend="pandas")
    facts = ["error", "nbytes", "format", "height", "width", "channels"]
    own = ["__key__", "__url__", "image", "label", "caption", "mask", "name"]
    assert list(ddf.columns) == [*own, *facts, *(f"mask.{fact}" for fact in facts)]
    frame = ddf.compute()
    assert frame["__key__"].tolist() == frame["name"].tolist() == [f"scene {n}" for n in range(18)]
    columns = (frame.images[name].arrays() for name in ("image", "mask"))
    for number, (photo, mask) in enumerate(zip(*columns, strict=True)):
        assert np.abs(photo.astype(int) - photos[number].pixels).mean() < 1
        want = None if number % 3 == 2 else labels[number][..., None]
        assert np.array_equal(mask, want) if want is not None else mask is None
    assert frame["mask.error"].isna().tolist() == [number % 3 != 2 for number in range(18)]
    work.clear()
    kept = ddf[ddf["mask.error"].isna() & (ddf.label == 0)].compute()
    assert len(kept) == 2 * 4  # of five rows in each file
    assert work["decoded"] == 2 * 10  # masks and photographs of the rows with this label
    assert ddf[["mask.width"]].compute()["mask.width"].notna().sum() == 12
    assert work["decoded"] == 2 * 10  # masks and photographs of the rows with this label


def test_all_images_of_a_row_are_transformed_by_the_same_random_numbers(tmp_path):
    from nvidia.dali import fn, types

    def turned(images):
        angle = fn.random.uniform(range=(-40.0, 40.0))
        return fn.rotate(images, angle=angle, interp_type=types.INTERP_NN, keep_size=True)

    random = np.random.default_rng(1)
    labels = [random.integers(0, 9, (20, 30), np.uint8) for _ in range(12)]
    pictures = [save(Image.fromarray(a[..., None].repeat(3, 2)), "PNG") for a in labels]
    masks = [save(Image.fromarray(each), "PNG") for each in labels]
    write(tmp_path / "a.parquet", pictures, "binary", seg=masks)
    mask = dii.ImageColumn("seg", mode="labels", transform=turned)
    read = functools.partial(dii.read_parquet_images, tmp_path, backend="pandas")
    both = read(image={"image": "image", "mask": mask}, transform=turned)
    first = both.compute()
    for frame in (first, both.shuffle("caption").compute()):
        pairs = zip(frame.images.arrays(), frame.images["mask"].arrays(), strict=True)
        assert all(np.array_equal(picture[..., :1], mask) for picture, mask in pairs)
    assert len({array.tobytes() for array in first.images.arrays()}) == 12
    # As of one column alone, and of references that are decoded later.
    alone = read(image="seg", mode="labels", transform=turned).compute()
    references = read(image="seg", decode=False)
    later = dii.decode_images(references, mode="labels", transform=turned).compute()
    for other in (alone.images["seg"], later.images["seg"]):
        assert all(map(np.array_equal, other.arrays(), first.images["mask"].arrays()))


def test_a_later_file_that_lacks_a_column_is_named(scenes):
    folder, _ = scenes
    path = folder / "1.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["seg"]), path)
    ddf = dii.read_parquet_images(folder, image=IMAGES, backend="pandas")
    assert len(ddf[["caption"]].compute()) == 18
    with pytest.raises(dii.ShardError, match=r"1\.parquet has no column 'seg'"):
        ddf.compute()
    pq.write_table(pq.read_table(path).append_column("seg", pa.array([1] * 9)), path)
    with pytest.raises(dii.ShardError, match=r"'seg' of .*1\.parquet holds no encoded images"):
        dii.read_parquet_images(folder, image=IMAGES, backend="pandas").compute()


def test_a_number_may_be_the_key_and_a_column_may_have_it_already(encoded, tmp_path):
    path = write(tmp_path / "a.parquet", encoded, id=np.arange(ROWS) + 500)
    ddf = dii.read_parquet_images(path, key="id", backend="pandas")
    assert ddf[ddf["__key__"] == "507"].caption.compute().tolist() == ["c7"]
    path = write(tmp_path / "b.parquet", encoded, __key__=[f"k{n}" for n in range(ROWS)])
    frame = dii.read_parquet_images(path, backend="pandas", errors="null").compute()
    assert frame["__key__"].tolist() == [f"k{n}" for n in range(ROWS)]
    with pytest.raises(dii.ImageDecodeError, match="sample 'k12'"):
        dii.read_parquet_images(path, backend="pandas", errors="raise").compute()


def test_row_groups_larger_than_a_partition_are_shared(encoded, monkeypatch, tmp_path):
    pq.write_table(pa.table({"image": encoded, "n": range(ROWS)}), tmp_path / "a.parquet")
    monkeypatch.setattr(module, "MOST_ENCODED", 1)
    ddf = dii.read_parquet_images(tmp_path, backend="pandas")
    assert ddf.npartitions == ROWS
    assert ddf.map_partitions(len).compute().tolist() == [1] * ROWS
    assert ddf.n.compute().tolist() == list(range(ROWS))


def test_a_partition_decodes_to_as_many_bytes_as_were_asked_for(file):
    image = 32 * 32 * 3
    for partition_size, partitions in ((5 * image, 3), (image, ROWS), (10**9, 3), (None, 3)):
        ddf = dii.read_parquet_images(
            file, backend="pandas", size=32, partition_size=partition_size
        )
        assert ddf.npartitions == partitions
        rows = ddf.map_partitions(len).compute()
        assert rows.sum() == ROWS
        assert rows.max() <= 5
    whole = dii.read_parquet_images(file, backend="pandas", partition_size="1 MB")
    assert whole.npartitions > 3
    assert whole.label.compute().tolist() == [row // 5 for row in range(ROWS)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"image": "caption"}, dii.ArgumentError, "holds no encoded images"),
        ({"image": "png"}, dii.ArgumentError, "has 'image', 'label', 'caption'"),
        ({"key": "png"}, dii.ArgumentError, "key='png': .*has 'image', 'label', 'caption'"),
        ({"columns": ["png"]}, dii.ArgumentError, "columns= names 'png'"),
        ({"image": {"mask": "image"}}, dii.ArgumentError, "one of the columns .* is 'image'"),
        ({"image": ["image"]}, dii.ArgumentError, "not the name of a column"),
        (
            {"image": {"image": "image", "caption": "image"}},
            dii.ArgumentError,
            "'caption' of their own",
        ),
        ({"filters": [("score", ">", 1)]}, dii.ArgumentError, "score"),
        ({"size": 0}, dii.ArgumentError, "size=0"),
        ({"decode": False, "size": 8}, dii.ArgumentError, "decode=False makes no pixels"),
        ({"errors": "ignore"}, dii.ArgumentError, "errors='ignore'"),
        ({"partition_size": 0}, dii.ArgumentError, "partition_size=0: .*'512 MiB'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, error, message, file):
    with pytest.raises(error, match=message):
        dii.read_parquet_images(file, backend="pandas", **arguments)


def test_paths_follow_the_rules_of_shards(file, tmp_path):
    for name in ("p-2.parquet", "p-10.parquet"):
        (tmp_path / name).symlink_to(file)
    ddf = dii.read_parquet_images(tmp_path, backend="pandas")
    assert len(ddf) == 2 * ROWS
    assert len(dii.read_parquet_images(tmp_path / "p-{2,10}.parquet", backend="pandas")) == 2 * ROWS
    with pytest.raises(dii.ShardNotFoundError, match="leads to no parquet file"):
        dii.read_parquet_images(tmp_path / "q-*.parquet", backend="pandas")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(dii.ShardError, match=r"text.parquet cannot be read"):
        dii.read_parquet_images(tmp_path / "text.parquet", backend="pandas")


@pytest.mark.parametrize("kind", ["struct", "binary"])
def test_a_row_of_no_bytes_costs_that_row_alone(kind, encoded, tmp_path):
    path = write(tmp_path / "a.parquet", [encoded[0], b"", None, encoded[1]], kind)
    frame = dii.read_parquet_images(path, backend="pandas").compute()
    assert [image is not None for image in frame.images.arrays()] == [True, False, False, True]
    assert frame.error.str.split(":").str[0].tolist() == [pd.NA, "empty", "missing", pd.NA]


@pytest.mark.parametrize("stored", [True, False], ids=["as a dictionary", "plain"])
@pytest.mark.parametrize("kind", ["struct", "binary"])
def test_images_that_a_dictionary_repeats_take_the_memory_of_one(
    kind, stored, encoded, monkeypatch, tmp_path
):
    """Not that of each row: a file of a megabyte would take gigabytes."""
    large = encoded[0] + bytes(1 << 20)
    image = pa.array([0] * 300, pa.int32())
    image = pa.DictionaryArray.from_arrays(image, pa.array([large], pa.binary()))
    if kind == "struct":
        image = pa.StructArray.from_arrays([image], ["bytes"])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": image}), path, store_schema=stored)
    assert path.stat().st_size < 2 << 20
    pool, default = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        sizes = dii.read_parquet_images(path, backend="pandas")["nbytes"].compute()
    finally:
        pa.set_memory_pool(default)
    assert sizes.tolist() == [len(large)] * 300
    assert pool.max_memory() < 20 << 20
    monkeypatch.setattr(dii.frames.pandas_backend.PandasBackend, "largest_partition", 100 << 20)
    with pytest.raises(MemoryError, match=r"rows 0-299 of .* of encoded images"):
        dii.read_parquet_images(path, backend="pandas", decode=False).image.compute()


def test_a_row_of_a_path_and_no_bytes_is_told_so(tmp_path):
    pq.write_table(
        pa.table({"image": pa.array([{"bytes": None, "path": "/etc/passwd"}], STRUCT)}),
        tmp_path / "a.parquet",
    )
    read = functools.partial(dii.read_parquet_images, tmp_path / "a.parquet", backend="pandas")
    for frame in (read(), dii.decode_images(read(decode=False))):
        assert "no bytes of an image, and a path in a table is not" in frame.error.compute().item()


def test_columns_named_as_fields_of_the_images_are_columns_of_their_own(encoded, tmp_path):
    names = {"image.bytes": ["not an image"] * ROWS, "image.path": [*range(ROWS)], ".": [1] * ROWS}
    write(tmp_path / "a.parquet", encoded, **names)
    write(tmp_path / "b.parquet", encoded)
    frame, expected = (
        dii.read_parquet_images(tmp_path / name, backend="pandas", size=8).compute()
        for name in ("a.parquet", "b.parquet")
    )
    for one, other in zip(frame.images.arrays(), expected.images.arrays(), strict=True):
        assert (one is None and other is None) or np.array_equal(one, other)
    assert frame["error"].fillna("").tolist() == expected["error"].fillna("").tolist()
    assert {name: frame[name].tolist() for name in names} == names


def test_an_image_with_nulls_among_its_bytes_costs_one_row(encoded, tmp_path):
    lists = [[*data] if data else None for data in encoded[:4]]
    lists[1][7] = lists[3][0] = None
    pq.write_table(
        pa.table({"image": pa.array(lists, pa.list_(pa.uint8()))}), tmp_path / "a.parquet"
    )
    frame = dii.read_parquet_images(tmp_path / "a.parquet", backend="pandas").compute()
    codes = frame["error"].str.partition(":")[0].fillna("").tolist()
    assert codes == ["", "missing", "", "missing"]
    for row in (0, 2):
        pixels = np.asarray(Image.open(io.BytesIO(encoded[row])).convert("RGB"))
        assert np.abs(frame.images.arrays()[row].astype(int) - pixels).mean() < 3
