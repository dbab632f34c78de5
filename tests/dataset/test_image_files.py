"""Image files are rows of the frame that a read of shards gives, and no file is opened in vain."""

import gzip
import os
import sys
import tarfile
from pathlib import Path

import dask
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from PIL import Image, ImageOps

import dask_image_ingest as dii
from dask_image_ingest.dataset import image_files as module
from dask_image_ingest.dataset.scan import file_rows

CLASSES = {"cat": 0, "dog": 1, "zebra": 2}  # as ImageFolder sorts them


@pytest.fixture(autouse=True)
def threads():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch):
    monkeypatch.setattr(module, "_MOST_FILES", 5)


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory):
    """Twelve photographs in three classes, one of them deeper, and three bad files."""
    root = tmp_path_factory.mktemp("pictures")
    for number, photo in enumerate(photos[:12]):
        below = ("zebra", "cat", "dog/deep")[number % 3]
        save(root / below / f"{number}.{photo.extension}", photo.encoded)
    save(root / "cat" / "page.jpg", b"<html>")
    save(root / "cat" / "empty.PNG", b"")
    save(root / "dog" / "cut.v2.jpg", photos[0].encoded[:-200])
    save(root / "cat" / "notes.txt", b"no image")
    return root


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def files_below(root):
    return sorted(
        path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".png", ".webp")
    )


@pytest.fixture
def opened(folder):
    """The files below the folder that this process opened, as Python's audit events tell them."""
    found = []
    watching = True

    def watch(event, args):
        if not watching or event != "open" or args[1] is None:
            return  # os.open, which has no mode, is called by open and told by it
        if str(args[0]).startswith(f"{folder}{os.sep}"):
            found.append(Path(args[0]))

    sys.addaudithook(watch)
    yield found
    watching = False


def read(paths, *given, **options):
    return dii.read_images(paths, *given, backend="pandas", **options)


def test_a_row_for_each_file_with_the_pixels_of_pillow(folder):
    frame = read(folder).compute()
    assert set(frame["__url__"]) == set(map(str, files_below(folder)))
    assert len(frame) == 15
    assert frame.index.is_unique
    bad = frame[frame.image.isna()]
    told = {
        key: error.partition(":")[0] for key, error in zip(bad["__key__"], bad.error, strict=True)
    }
    assert told == {"cat/page": "not-an-image", "cat/empty": "empty", "dog/cut.v2": "truncated"}
    good = frame[frame.error.isna()]
    assert len(good) == 12
    for array, (_, row) in zip(good.images.arrays(), good.iterrows(), strict=True):
        path = Path(row["__url__"])
        assert row["__key__"] == path.relative_to(folder).as_posix().removesuffix(path.suffix)
        assert row["nbytes"] == path.stat().st_size
        assert row["offset"] == 0
        with Image.open(path) as picture:
            assert (row["width"], row["height"]) == picture.size
            assert row["format"] == picture.format.lower()
            assert row["channels"] == len(picture.getbands())
            expected = np.asarray(picture.convert("RGB"))
        assert array.shape == expected.shape
        assert np.abs(array.astype(int) - expected).mean() < 1


def test_columns_and_types_are_those_of_a_read_of_shards(folder, shards):
    like = dii.read_webdataset_images(shards, backend="pandas")
    ddf = read(folder, label="folder")
    expected = [name for name in like.columns if name not in ("txt", "cls", "json")]
    others = ddf.drop(columns=["label", "class_name"])
    assert list(others.columns) == expected
    assert others.dtypes.equals(like[expected].dtypes)
    assert ddf.compute().dtypes.equals(ddf.dtypes)


def test_labels_are_those_of_torchvisions_image_folder(folder):
    frame = read(folder, label="folder").compute()
    # Its rule by hand: the sorted names of the folders of the root, for all that is below them.
    for url, label in zip(frame["__url__"], frame.label, strict=True):
        assert label == CLASSES[Path(url).relative_to(folder).parts[0]]
    names = frame.drop_duplicates("label").sort_values("label")["class_name"]
    assert names.tolist() == list(CLASSES)
    assert str(frame.label.dtype) == "int64[pyarrow]"


def test_a_file_in_no_class_has_no_label(folder, photos, tmp_path):
    save(tmp_path / "2.jpg", photos[0].encoded)
    save(tmp_path / "b" / "1.jpg", photos[0].encoded)
    frame = read(tmp_path, label="folder").compute()
    assert dict(zip(frame["__key__"], frame.label.isna(), strict=True)) == {"2": True, "b/1": False}
    with pytest.raises(dii.ArgumentError, match="no file lies in a folder below"):
        read(folder / "dog" / "deep", label="folder")


@pytest.mark.parametrize(
    "ways",
    [
        lambda root: root,
        lambda root: f"{root}/",
        lambda root: f"{root}/[!_]*/**/*",
        lambda root: [f"{root}/{name}" for name in CLASSES],
        lambda root: f"{root}/{{cat,dog,zebra}}/**/*",
        lambda root: [root / "dog", *(root / "cat").iterdir(), f"{root}/zebra/*"],
        lambda root: iter(files_below(root)),
    ],
)
def test_files_are_found_in_any_way_with_the_same_keys_and_order(ways, folder, tmp_path):
    expected = read(folder, label="folder")[["__key__", "label"]].compute()
    given = ways(folder)
    if isinstance(given, list) and len(given) > 3:
        given = [path for path in given if not str(path).endswith(".txt")]
    made = read(given, label="folder")[["__key__", "label"]].compute()
    pd.testing.assert_frame_equal(made, expected)


def test_the_root_of_one_file_is_its_folder(folder):
    assert read(folder / "cat" / "1.jpg")["__key__"].compute().tolist() == ["1"]


def test_nothing_is_opened_for_what_the_listing_tells(folder, opened, work):  # noqa: F811
    ddf = read(folder, label="folder", size=32)
    assert len(ddf) == 15
    assert ddf.npartitions == 3
    assert ddf[["__key__", "nbytes", "label"]].compute().shape == (15, 3)
    assert len(ddf[ddf.label == 1]) == 5
    assert ddf[ddf["__key__"].str.startswith("cat")]["nbytes"].sum().compute() > 0
    assert len(ddf.partitions[1]["__url__"].compute()) == 5
    assert opened == []
    assert work["decoded"] == 0


def test_a_filter_leaves_files_closed_and_each_other_is_opened_once(folder, opened, work):  # noqa: F811
    ddf = read(folder, label="folder", size=32)
    frame = ddf[ddf.label == 1].compute()
    assert sorted(map(str, opened)) == sorted(frame["__url__"])  # for headers and pixels, once
    assert work["decoded"] == 5
    del opened[:]
    assert len(ddf.head(2)) == 2
    assert len(opened) == 2


def test_headers_are_read_where_asked_for_and_decode_nothing(folder, opened, work):  # noqa: F811
    ddf = read(folder, size=32)
    widths = ddf.width.compute()
    assert len(opened) == 15
    assert work["decoded"] == 0
    assert widths.isna().sum() == 2
    kept = ddf[ddf.width > 200].compute()
    assert work["decoded"] == len(kept) == (widths > 200).sum()


def test_exif_orientation_is_as_pillow_turns_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.linear_gradient("L").convert("RGB").resize((64, 40)).save(path, quality=95, exif=exif)
    frame = read(path).compute()
    assert (frame.height.item(), frame.width.item()) == (64, 40)
    with Image.open(path) as picture:
        expected = np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
    assert np.abs(frame.images.arrays()[0].astype(int) - expected).mean() < 1


def test_partitions_hold_no_more_than_they_may(folder, photos):
    largest = max(photo.pixels.nbytes for photo in photos[:12])
    ddf = read(folder, partition_size=2 * largest)
    held = [sum(a.nbytes for a in part.images.arrays() if a is not None) for part in parts(ddf)]
    assert len(held) > 3
    assert max(held) <= 4 * largest
    assert read(folder, partition_size=None).npartitions == 3


def parts(ddf):
    return [ddf.partitions[number].compute() for number in range(ddf.npartitions)]


def test_rows_of_any_reads_of_a_file_have_one_label(folder):
    ddf = read(folder)
    keys = ddf["__key__"].compute()
    assert ddf[ddf.index.to_series() == keys.index[6]]["__key__"].compute().tolist() == [
        keys.iloc[6]
    ]
    dogs = read(folder / "dog")
    both = ddf[["__url__"]].assign(of_dogs=dogs["__url__"]).compute()
    paired = both[both["of_dogs"].notna()]
    assert len(paired) == len(dogs) < len(ddf)
    assert (paired["of_dogs"] == paired["__url__"]).all()


@pytest.mark.parametrize("errors", ["drop", "raise"])
def test_bad_files_are_dropped_or_raised(errors, folder):
    ddf = read(folder, errors=errors)
    if errors == "drop":
        assert len(ddf) == len(ddf.compute()) == 12
    else:
        with pytest.raises(dii.ImageDecodeError, match=r"cat/(page|empty)"):
            ddf.compute()


def test_a_file_of_another_version_is_an_error(photos, tmp_path):
    path = tmp_path / "a" / "1.jpg"
    save(path, photos[0].encoded)
    ddf = read(tmp_path)
    save(path, photos[1].encoded)
    for changed in (ddf, ddf.sort_values("nbytes")):
        with pytest.raises(dii.ShardError, match=r"1.jpg has changed"):
            changed.compute()
    assert ddf["__key__"].compute().tolist() == ["a/1"]


def gone(path):
    path.unlink()


def unreadable(path):
    os.rename(path, path.with_suffix(".moved"))
    path.mkdir()


@pytest.mark.parametrize("spoil", [gone, unreadable])
@pytest.mark.parametrize("step", [lambda ddf: ddf, lambda ddf: ddf.sort_values("nbytes")])
def test_a_file_that_cannot_be_read_any_more_costs_its_row(step, spoil, photos, tmp_path):
    for number in range(3):
        save(tmp_path / f"{number}.jpg", photos[number].encoded)
    null, drop, refuse = (read(tmp_path, size=16, errors=e) for e in ("null", "drop", "raise"))
    spoil(tmp_path / "1.jpg")
    frame = step(null).compute().set_index("__key__").sort_index()
    assert frame.image.isna().tolist() == [False, True, False]
    assert frame.error["1"].startswith("missing: the file ")
    assert frame.error.isna().tolist() == [True, False, True]
    assert frame.width.isna().tolist() == null.width.compute().isna().tolist()
    assert len(step(drop).compute()) == 2
    with pytest.raises(dii.ImageDecodeError, match=r"'1' of .*missing: the file"):
        step(refuse).compute()


def test_a_partition_holds_few_encoded_bytes(photos, tmp_path, monkeypatch):
    for number, photo in enumerate(photos[:12]):
        save(tmp_path / f"{number:02}.{photo.extension}", photo.encoded)
    largest = max(len(photo.encoded) for photo in photos[:12])
    monkeypatch.setattr(module, "MOST_ENCODED", largest)
    ddf = read(tmp_path, size=8)
    sizes = [part["nbytes"] for part in parts(ddf[["nbytes"]])]
    assert len(sizes) > 3
    assert max(map(sum, sizes)) <= largest
    # One that is larger is alone, and as files are added the partitions before them stay.
    monkeypatch.setattr(module, "MOST_ENCODED", largest - 1)
    before = read(tmp_path, size=8).map_partitions(len).compute().tolist()
    assert 1 in before
    save(tmp_path / "99.jpg", photos[0].encoded)
    after = read(tmp_path, size=8).map_partitions(len).compute().tolist()
    assert after[: len(before) - 1] == before[:-1]


def test_a_large_file_that_is_no_image_is_not_read(photos, tmp_path, monkeypatch):
    save(tmp_path / "video.jpg", b"\0\0\0 ftypisom" + bytes(1_000_000))
    save(tmp_path / "photo.jpg", photos[0].encoded)
    monkeypatch.setattr(file_rows, "MOST_ENCODED", 1000)
    read_bytes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: read_bytes.append(a[1]) or pread(*a))
    frame = read(tmp_path).compute()
    assert frame.error.isna().tolist() == [True, False]
    assert sum(read_bytes) < 2 * len(photos[0].encoded) + 100_000


def test_a_file_is_read_as_it_is_stored(photos, tmp_path):
    save(tmp_path / "1.jpg", gzip.compress(photos[0].encoded))
    for frame in (read(tmp_path), read(tmp_path).sort_values("nbytes")):
        assert frame.compute().error.item().startswith("not-an-image")


def test_columns_and_filters_are_those_of_the_other_reads(folder, opened, work):  # noqa: F811
    whole = read(folder, label="folder", size=32).compute()
    del opened[:]
    frame = read(
        folder,
        ["image", "class_name", "width"],
        [("label", "==", 1), ("width", ">", 100)],
        label="folder",
        size=32,
    ).compute()
    expected = whole[(whole.label == 1) & (whole.width > 100)]
    pd.testing.assert_frame_equal(frame[["class_name", "width"]], expected[["class_name", "width"]])
    for one, other in zip(frame.images.arrays(), expected.images.arrays(), strict=True):
        assert np.array_equal(one, other) if other is not None else one is None
    # Those of no other class were opened, for headers or for pixels.
    assert {path.relative_to(folder).parts[0] for path in opened} == {"dog"}
    with pytest.raises(dii.ArgumentError, match="the columns of the first shard are"):
        read(folder, ["label"])


def test_a_predicate_of_any_kind_leaves_the_other_files_closed(folder, opened, work):  # noqa: F811
    ddf = read(folder, label="folder", size=32)
    expected = ddf.compute()
    expected = expected[expected["__key__"].str.startswith("cat")]
    del opened[:]
    made = ddf[ddf["__key__"].str.startswith("cat")].compute()
    assert sorted(map(str, opened)) == sorted(expected["__url__"])
    names = ["__key__", "format", "height", "width", "channels", "error", "label"]
    pd.testing.assert_frame_equal(made[names], expected[names])
    assert made.dtypes.equals(expected.dtypes)
    del opened[:]
    none = ddf[ddf["__key__"].str.startswith("none")].compute()
    assert (len(none), opened) == (0, [])
    assert none.dtypes.equals(expected.dtypes)


def test_files_of_one_key_are_the_images_of_a_row(photos, tmp_path):
    for number, photo in enumerate(photos[:6]):
        path = tmp_path / "in" / f"{number % 2}" / f"{number}.{photo.extension}"
        save(path, photo.encoded)
        labels = Image.new("P", (9, 7), number)
        labels.putpalette(bytes(range(256)) * 3)
        if number != 3:
            labels.save(path.with_name(f"{number}.Seg.png"))
    save(tmp_path / "in" / "notes.png", b"another file")
    images = {"image": "jpg;webp;png", "mask": dii.ImageColumn("seg.png", mode="labels")}
    images["image"] = ";".join({photo.extension for photo in photos[:6]})
    ddf = read(tmp_path / "in", image=images, label="folder")
    ddf = ddf[ddf["__key__"] != "notes"]
    frame = ddf.compute()
    assert frame["__key__"].tolist() == ["0/0", "0/2", "0/4", "1/1", "1/3", "1/5"]
    assert frame.label.tolist() == [0, 0, 0, 1, 1, 1]
    masks = frame.images["mask"].arrays()
    for key, mask, image in zip(frame["__key__"], masks, frame.images.arrays(), strict=True):
        number = int(key[2])
        assert image.shape == photos[number].pixels.shape
        if number == 3:
            assert mask is None
        else:
            assert (mask.shape, set(mask.flat)) == ((7, 9, 1), {number})
    assert frame["mask.error"].tolist()[4] == "missing: the sample has no image member"
    assert frame["mask.nbytes"].isna().sum() == 1
    moved = ddf.sort_values("nbytes").compute().loc[frame.index]
    assert moved["mask.error"].tolist() == frame["mask.error"].tolist()
    assert [a is None for a in moved.images["mask"].arrays()] == [a is None for a in masks]
    dii.to_webdataset(ddf, tmp_path / "{shard}.tar", row_errors="drop")
    with tarfile.open(tmp_path / "0.tar") as tar:
        found = sorted(tar.extractfile(member).read() for member in tar)
    stored = [path.read_bytes() for path in (tmp_path / "in").rglob("[0-9].*")]
    assert found == sorted(stored)


def test_references_survive_parquet_and_become_the_same_images(folder, tmp_path):
    references = read(folder, decode=False)
    assert "error" not in references.columns
    expected = read(folder, size=32).compute()
    references.compute().to_parquet(tmp_path / "stored.parquet")
    again = dii.decode_images(pd.read_parquet(tmp_path / "stored.parquet"), size=32)
    assert again.error.tolist() == expected.error.tolist()
    for one, other in zip(again.images.arrays(), expected.images.arrays(), strict=True):
        assert np.array_equal(one, other) if one is not None else other is None
    table = expected.drop(columns=["image", "error"])
    late = dii.decode_images(table, size=32)  # by __url__, offset and nbytes
    assert late.error.tolist() == expected.error.tolist()


def test_operations_of_images_work(folder, tmp_path, opened):
    ddf = read(folder, label="folder", size=32)
    good = ddf[ddf.error.isna()]
    assert good.images.stack().compute().shape == (12, 32, 32, 3)
    means = good.images.map_batches(lambda x: x.mean(axis=(1, 2, 3)), {"mean": "float32"})
    assert means["mean"].compute().notna().all()
    batches = list(good[["image", "label"]].images.iter_batches(5))
    assert sorted(np.concatenate([batch["label"] for batch in batches])) == sorted(
        good.label.compute()
    )
    del opened[:]
    assert len(ddf.images.show(4)) == 4
    assert len(set(opened)) == 4
    assert len(dii.gallery(ddf, tmp_path / "page.html")) == 15


def test_images_are_decoded_after_a_sort(folder, work):  # noqa: F811
    ddf = read(folder, size=32)
    frame = ddf.sort_values("nbytes", ascending=False).head(2)
    sizes = sorted((path.stat().st_size for path in files_below(folder)), reverse=True)
    assert frame["nbytes"].tolist() == sizes[:2]
    assert frame.image.notna().all()


def test_remote_files_are_those_of_the_folder(folder, s3_server):
    s3fs = pytest.importorskip("s3fs")
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": s3_server}}
    fs = s3fs.S3FileSystem(**options)
    fs.mkdir("pictures")
    for path in files_below(folder):
        fs.pipe(f"pictures/{path.relative_to(folder).as_posix()}", path.read_bytes())
    expected = read(folder, label="folder", size=32).compute()
    for paths in ("s3://pictures/", "s3://pictures/**/*.*"):
        frame = read(paths, label="folder", size=32, storage_options=options).compute()
        frame.index = expected.index
        same = ["__key__", "nbytes", "width", "height", "label", "error"]
        pd.testing.assert_frame_equal(frame[same], expected[same])
        for one, other in zip(frame.images.arrays(), expected.images.arrays(), strict=True):
            assert np.array_equal(one, other) if one is not None else other is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": "name"}, "label='name'"),
        ({"size": 0}, "size=0"),
        ({"partition_size": 0}, "partition_size=0"),
        ({"decode": False, "size": 8}, "decode=False makes no pixels"),
        ({"errors": "ignore"}, "errors='ignore'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message, folder):
    with pytest.raises(dii.ArgumentError, match=message):
        read(folder, **arguments)


def test_paths_that_lead_to_no_image_are_errors(tmp_path, folder):
    with pytest.raises(dii.ShardNotFoundError, match=r"leads to no image file.*no .jpg, .jpeg"):
        read(tmp_path)
    with pytest.raises(dii.ShardNotFoundError, match=r"leads to no image file"):
        read(tmp_path / "*.jpg")
    with pytest.raises(dii.ArgumentError, match=r"is a command, which gives no image file"):
        read("pipe:cat x.jpg", storage_options={"allow_pipes": True})


def test_random_numbers_are_those_of_the_file(folder, photos, tmp_path):
    from nvidia.dali import fn

    for name in ("1", "2"):
        save(tmp_path / f"{name}.jpg", photos[0].encoded)

    def turned(images):
        return fn.rotate(images, angle=fn.random.uniform(range=(-90, 90)), keep_size=True)

    ddf = read(tmp_path, size=32, transform=turned)
    one, other = ddf.compute().images.arrays()
    assert not np.array_equal(one, other)  # the same picture, in two files
    (alone,) = ddf[ddf["__key__"] == "2"].compute().images.arrays()
    assert np.array_equal(alone, other)
