"""From shards to a frame: rows, columns, types, pixels, and what is refused at once."""

import io
import warnings
from fractions import Fraction

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from photo_shards import encode, write_tar
from PIL import Image
from tars import tar
from webdataset.tariterators import group_by_keys, tar_file_iterator

import dask_image_ingest as dii
from dask_image_ingest.frames.image_dtype import IMAGE, ImageDtype

COLUMNS = {
    "__key__": "string",
    "__url__": "string",
    "offset": "int64[pyarrow]",
    "nbytes": "int64[pyarrow]",
    "format": "string",
    "height": "int32[pyarrow]",
    "width": "int32[pyarrow]",
    "channels": "int32[pyarrow]",
    "error": "string",
    "txt": "string",
    "cls": "int64[pyarrow]",
    "json": "string",
}


def read(paths, **options):
    return dii.read_webdataset_images(paths, backend="pandas", **options)


def assert_same_pixels(frame, photos):
    """Each row's pixels are Pillow's for that key, within the rounding of two JPEG decoders."""
    expected = {photo.key: photo.pixels for photo in photos}
    arrays = frame.images.arrays()
    assert len(arrays) == len(frame)
    for key, got in zip(frame["__key__"], arrays, strict=True):
        want = expected[key]
        assert got.shape == want.shape
        assert got.dtype == np.uint8
        assert np.abs(got.astype(int) - want).mean() <= 1.0


def webdataset_samples(shard):
    """What the webdataset library makes of a shard; it would not close a file that it opened."""
    with open(shard, "rb") as stream:
        files = list(tar_file_iterator(stream))
    yield from group_by_keys({**file, "__url__": str(shard)} for file in files)


def test_every_column_has_its_documented_type(shards):
    ddf = read(shards)
    types = {name: str(dtype) for name, dtype in ddf.dtypes.items()}
    assert {name: types[name] for name in COLUMNS} == COLUMNS
    assert isinstance(ddf.dtypes["image"], ImageDtype)
    assert ddf.dtypes["image"].pyarrow_dtype == IMAGE
    assert list(ddf.columns) == [*COLUMNS, "image"]
    assert ddf.compute().dtypes.to_dict() == ddf.dtypes.to_dict()


def test_rows_keys_and_captions_are_those_of_webdataset(shards):
    frame = read(shards).compute()
    samples = [sample for shard in shards for sample in webdataset_samples(shard)]
    assert frame["__key__"].tolist() == [sample["__key__"] for sample in samples]
    assert frame["__url__"].tolist() == [sample["__url__"] for sample in samples]
    assert frame["txt"].tolist() == [sample["txt"].decode() for sample in samples]
    assert frame["cls"].tolist() == [int(sample["cls"]) for sample in samples]
    assert frame["json"].tolist() == [sample["json"].decode() for sample in samples]


def test_pixels_are_those_of_pillow(shards, photos):
    assert_same_pixels(read(shards).compute(), photos)


def test_a_row_points_to_its_own_bytes(shards, photos):
    frame = read(shards)[["__url__", "offset", "nbytes"]].compute()
    for row, photo in zip(frame.itertuples(), photos, strict=True):
        with open(row[1], "rb") as file:
            file.seek(row.offset)
            assert file.read(row.nbytes) == photo.encoded


def test_header_facts_are_those_of_pillow(shards, photos):
    frame = read(shards)[["format", "height", "width", "channels"]].compute()
    for row, photo in zip(frame.itertuples(index=False), photos, strict=True):
        image = Image.open(io.BytesIO(photo.encoded))
        want = (image.format.lower(), image.height, image.width, len(image.getbands()))
        assert tuple(row) == want


def test_one_partition_per_shard_and_the_index_numbers_its_samples(shards):
    ddf = read(shards)
    assert ddf.npartitions == len(shards)
    labels = ddf.get_partition(1).compute().index
    assert (labels - labels[0]).tolist() == list(range(8))


def test_json_fields_become_typed_columns(shards, photos):
    fields = {"similarity": "float32", "source.name": "string", "no": "bool"}
    with pytest.warns(UserWarning, match="no field 'no'"):
        ddf = read(shards, json_fields=fields)
    frame = ddf[["json.similarity", "json.source.name", "json.no"]].compute()
    want = np.array([photo.similarity for photo in photos], np.float32)
    assert str(frame.dtypes["json.similarity"]) == "float[pyarrow]"
    assert frame["json.similarity"].to_numpy(np.float32).tolist() == want.tolist()
    assert frame["json.source.name"].tolist() == [photo.key for photo in photos]
    assert frame["json.no"].isna().all()


def test_components_can_be_named_with_their_types(shards):
    ddf = read(shards, members={"txt": "binary", "cls": "string"})
    assert [str(ddf.dtypes[name]) for name in ("txt", "cls")] == ["binary[pyarrow]", "string"]
    assert "json" not in ddf.columns


def test_a_missing_member_is_null_and_a_missing_image_an_error(tmp_path, photos):
    photo = photos[0]
    path = write_tar(
        tmp_path / "a.tar",
        {"a.jpg": photo.encoded, "a.txt": b"both", "b.jpg": photo.encoded, "c.txt": b"text"},
    )
    frame = read(path).compute()
    assert frame["txt"].isna().tolist() == [False, True, False]
    assert frame["image"].isna().tolist() == [False, False, True]
    assert frame["error"].iloc[2].startswith("missing: ")
    assert frame["nbytes"].isna().tolist() == [False, False, True]


def test_a_kind_of_member_that_comes_late_is_left_out_with_one_warning(tmp_path, photos):
    encoded = photos[0].encoded
    write_tar(tmp_path / "0.tar", {"a.jpg": encoded})
    for name in "12":
        write_tar(tmp_path / f"{name}.tar", {"b.jpg": encoded, "b.late-kind": b"x"})
    with pytest.warns(UserWarning, match=r"'late-kind'.*members=") as caught:
        frame = read(tmp_path).compute()
    assert len(caught) == 1
    assert len(frame) == 3
    assert "late-kind" not in frame.columns


def test_a_picture_beside_the_image_that_comes_late_is_told_too(tmp_path, photos):
    encoded, mask = photos[0].encoded, encode(Image.new("L", (8, 8)), "png")
    write_tar(tmp_path / "0.tar", {"a.jpg": encoded})
    write_tar(tmp_path / "1.tar", {"b.jpg": encoded, "b.png": mask, "c.png": mask})
    with pytest.warns(UserWarning, match="extensions that have no column: 'png'"):
        frame = read(tmp_path).compute()
    assert frame["format"].tolist() == ["jpeg", "jpeg", "png"]


@pytest.mark.parametrize("name", ["k.{}.txt", "k{}.{}", "train/.{}.jpg"])
def test_very_many_kinds_of_members_are_few_columns_and_the_warning_tells_what_a_key_is(
    tmp_path, photos, name
):
    members = {name.format(number, number): b"x" for number in range(500)}
    path = write_tar(tmp_path / "0.tar", {"a.jpg": photos[0].encoded, "a.txt": b"-"} | members)
    with pytest.warns(UserWarning, match=r"kinds of members, of which the 64 .* first dot of the"):
        ddf = read(path)
    assert len(ddf.columns) == len(COLUMNS) - 3 + 64 + 1
    assert "a" in ddf["__key__"].compute().tolist()


def linked_to_nothing(folder):
    (folder / "gone.jpg").symlink_to("nowhere")
    dii.read_images(folder, backend="pandas")


def of_a_damaged_index(folder):
    dii.write_index(str(folder / "0.tar"))
    (folder / "0.tar.index.parquet").write_bytes(b"PAR1 no index PAR1")
    read(folder)


WARNED = {
    "left out 1 links to nothing": linked_to_nothing,
    "'mask' is decoded as RGB": lambda f: read(f, image={"image": "jpg", "mask": "png"}),
    "kinds of members, of which the 64": read,
    "no member 'cls'": lambda f: read(f, members={"cls": int}),
    "1 of 1 values of 'txt' are not int64": lambda f: read(f, members={"txt": int}).compute(),
    "is not used": of_a_damaged_index,
    "is damaged at byte": lambda f: read(f, members={"txt": str}).compute(),
}


@pytest.mark.parametrize("told", WARNED)
def test_a_warning_points_at_the_line_that_led_to_it(told, tmp_path, photos):
    members = {f"a.{number}": b"x" for number in range(100 * ("kinds" in told))}
    encoded = photos[0].encoded
    path = write_tar(tmp_path / "0.tar", {"a.jpg": encoded, "a.png": b"", "a.txt": b"-"} | members)
    if "damaged" in told:
        path.write_bytes(path.read_bytes()[:-1024] + b"no header" * 100)
    (tmp_path / "b.jpg").write_bytes(encoded)
    with dask.config.set(scheduler="sync"), pytest.warns(UserWarning, match=told) as caught:
        WARNED[told](tmp_path)
    assert {each.filename for each in caught} == {__file__}


def test_names_with_dots_are_told_that_a_key_ends_at_the_first_dot(tmp_path, photos):
    path = write_tar(tmp_path / "0.tar", {"frame.0001.jpg": photos[0].encoded})
    with pytest.warns(UserWarning, match=r"'name.0001.jpg' is the member '0001.jpg' of 'name'"):
        read(path)


def test_labels_that_are_no_integers_are_strings(tmp_path, photos):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": photos[0].encoded, "a.cls": b"cat"})
    assert read(path).cls.compute().tolist() == ["cat"]


def test_a_value_of_the_wrong_type_is_null_with_a_warning(tmp_path, photos):
    encoded = photos[0].encoded
    write_tar(tmp_path / "0.tar", {"a.jpg": encoded, "a.cls": b"1"})
    write_tar(tmp_path / "1.tar", {"b.jpg": encoded, "b.cls": b"cat", "c.jpg": encoded})
    with pytest.warns(UserWarning, match=r"1 of 2 values of 'cls' are not int64.*'b'"):
        assert read(tmp_path).cls.compute().isna().tolist() == [False, True, True]


def test_an_image_kind_beside_the_image_is_a_component(tmp_path, photos):
    mask = encode(Image.new("L", (8, 8)), "png")
    path = write_tar(tmp_path / "a.tar", {"a.jpg": photos[0].encoded, "a.png": mask})
    assert read(path).png.compute().tolist() == [mask]
    only = read(path, image="png").compute()
    assert only["format"].tolist() == ["png"]
    assert only["jpg"].tolist() == [photos[0].encoded]


def test_a_member_named_as_a_column_does_not_take_its_place(tmp_path, photos):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": photos[0].encoded, "a.width": b"7"})
    frame = read(path).compute()
    assert frame["width"].tolist() == [photos[0].pixels.shape[1]]
    assert frame["member.width"].tolist() == [b"7"]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"size": 64}, (64, 64, 3)),
        ({"size": (32, 48), "resize": "crop"}, (32, 48, 3)),
        ({"size": (32, 48), "resize": "pad"}, (32, 48, 3)),
        ({"size": 64, "mode": "L"}, (64, 64, 1)),
    ],
)
def test_size_gives_every_image_one_shape(shards, options, shape):
    assert {a.shape for a in read(shards, **options).compute().images.arrays()} == {shape}


@pytest.mark.parametrize(("resize", "edge"), [("shorter", min), ("longer", max)])
def test_one_edge_is_scaled_and_the_aspect_kept(shards, photos, resize, edge):
    arrays = read(shards, size=100, resize=resize).compute().images.arrays()
    for array, photo in zip(arrays, photos, strict=True):
        height, width = photo.pixels.shape[:2]
        # As in torchvision, the other edge is cut to whole pixels.
        scale = Fraction(100, edge(height, width))
        assert array.shape[:2] == (int(height * scale), int(width * scale))


def test_resizing_is_pillows_triangular_filter(shards, photos):
    arrays = read(shards, size=(60, 50)).compute().images.arrays()
    for array, photo in zip(arrays, photos, strict=True):
        want = Image.fromarray(photo.pixels).resize((50, 60), Image.Resampling.BILINEAR)
        assert np.abs(array.astype(int) - np.asarray(want)).mean() < 1.5


def flip(images):
    from nvidia.dali import fn

    return fn.flip(images, horizontal=1)


def random_crop_and_flip(images):
    from nvidia.dali import fn

    window = fn.random_resized_crop(images, size=(40, 40))
    return fn.flip(window, horizontal=fn.random.coin_flip())


def to_float(images):
    from nvidia.dali import fn, types

    return fn.cast(images, dtype=types.FLOAT)


def test_a_transform_is_applied_to_every_image(shards):
    plain = read(shards, size=50).compute().images.arrays()
    flipped = read(shards, size=50, transform=flip).compute().images.arrays()
    for before, after in zip(plain, flipped, strict=True):
        np.testing.assert_array_equal(before[:, ::-1], after)


def test_a_random_transform_gives_the_same_when_a_task_is_repeated(shards):
    ddf = read(shards, transform=random_crop_and_flip)
    once, again = (ddf.compute().images.arrays() for _ in range(2))
    np.testing.assert_array_equal(np.stack(once), np.stack(again))
    assert once[0].shape == (40, 40, 3)


def test_a_transform_to_floats_is_refused(shards):
    with pytest.raises(dii.ArgumentError, match="FLOAT"):
        read(shards, transform=to_float).compute()


@pytest.fixture
def partly_bad(tmp_path, photos):
    members = {f"{n}.jpg": photo.encoded for n, photo in enumerate(photos[:5])}
    members["2.jpg"] = b"<html>not found</html>"
    members["4.jpg"] = photos[4].encoded[:-200]
    return write_tar(tmp_path / "bad.tar", members)


def test_a_bad_image_costs_its_own_pixels_only(partly_bad, photos):
    frame = read(partly_bad).compute()
    assert frame["image"].isna().tolist() == [False, False, True, False, True]
    codes = frame["error"].str.partition(":")[0]
    assert codes.dropna().tolist() == ["not-an-image", "truncated"]
    for row in (0, 1, 3):
        got = frame.images.arrays()[row]
        assert np.abs(got.astype(int) - photos[row].pixels).mean() <= 1


def test_errors_drop_drops_rows_even_where_only_counted(partly_bad):
    ddf = read(partly_bad, errors="drop")
    assert ddf["__key__"].compute().tolist() == ["0", "1", "3"]
    assert len(ddf) == 3


def test_errors_raise_names_the_shard_and_the_key(partly_bad):
    with pytest.raises(dii.ImageDecodeError, match=r"bad\.tar.*'2'.*not-an-image"):
        read(partly_bad, errors="raise").compute()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    "question",
    [
        len,
        lambda ddf: len(ddf[["__key__", "height"]].compute()),
        lambda ddf: len(ddf.drop(columns=["image", "error"]).compute()),
        lambda ddf: len(ddf.index),
        lambda ddf: len(ddf.shuffle("__key__")[["__key__"]].compute()),
        lambda ddf: ddf.groupby("__url__").size().compute().sum(),
    ],
)
def test_errors_raise_has_metadata_of_bad_images(partly_bad, question, late):
    with dask.config.set({"image-ingest.decode-late": late}):
        assert question(read(partly_bad, errors="raise")) == 5


@pytest.mark.parametrize("columns", [["image"], ["error"]])
def test_errors_raise_where_errors_are_asked_for(partly_bad, columns):
    with pytest.raises(dii.ImageDecodeError, match="'2'"):
        read(partly_bad, errors="raise")[columns].compute()


def test_bad_images_are_one_line_in_the_log(partly_bad, caplog):
    read(partly_bad).compute()
    (record,) = caplog.records
    assert "2 of 5 images" in record.getMessage()


def test_a_bomb_is_an_error_row(shards, photos):
    sizes = [photo.pixels.shape[0] * photo.pixels.shape[1] for photo in photos]
    limit = sorted(sizes)[len(sizes) // 2]
    frame = read(shards, max_pixels=limit).compute()
    assert frame["image"].isna().tolist() == [size > limit for size in sizes]
    assert frame["error"].dropna().str.startswith("too-large: ").all()


LINES = {"line": (1, 60_000), "upright": (15_000, 1), "good": (40, 60)}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Images of one pixel's width among others, as PNG: 254 bytes would become 47 GB."""
    members = {
        f"{key}.png": encode(Image.fromarray(np.zeros((*shape, 3), np.uint8)), "png")
        for key, shape in LINES.items()
    }
    return write_tar(tmp_path_factory.mktemp("lines") / "lines.tar", members)


def the_line_is_too_large(frame, most="max_pixels=178,956,970"):
    """An error for each of the two lines, and pixels for the other image, where asked for."""
    frame = frame.sort_values("__key__")
    first, second, third = frame["error"].tolist() if "error" in frame else [None] * 3
    if "error" in frame:
        assert pd.isna(first)
        assert second == (
            "too-large: 60000 x 1 resized to 30720000 x 512 is 15,728,640,000 pixels, "
            f"more than {most}"
        )
        assert third.startswith("too-large: 1 x 15000 resized to 512 x 7680000 is ")
    if "image" in frame:
        shapes = [None if array is None else array.shape for array in frame.images.arrays()]
        assert shapes == [(512, 768, 3), None, None]


RESIZED = {"size": 512, "resize": "shorter"}
WAYS = {
    "read": lambda ddf, paths: ddf,
    "errors alone": lambda ddf, paths: ddf[["__key__", "error"]],
    "bad rows without pixels": lambda ddf, paths: ddf.drop(columns="image"),
    "images alone": lambda ddf, paths: ddf[["__key__", "image"]],
    "moved": lambda ddf, paths: ddf.shuffle("format"),
    "moved before": lambda ddf, paths: ddf.sort_values("nbytes"),
    "decoded late": lambda ddf, paths: dii.decode_images(
        dii.read_webdataset_images(paths, backend="pandas")[list(ddf.columns[:6])], **RESIZED
    ),
    "no limit": lambda ddf, paths: read(paths, **RESIZED, max_pixels=None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", [False, True])
def test_a_line_that_would_be_enormous_is_one_bad_row(lines, way, index):
    if index:
        dii.write_index(lines)
    frame = WAYS[way](read(lines, index=index, **RESIZED), lines).compute(scheduler="sync")
    no_limit = "the 715,827,882 that a column can hold"
    the_line_is_too_large(frame, no_limit if way == "no limit" else "max_pixels=178,956,970")
    assert sorted(frame["__key__"]) == sorted(LINES)


@pytest.mark.more
def test_only_the_resize_that_makes_lines_long_refuses_them(lines):
    for resize in ("stretch", "longer", "crop", "pad"):
        assert read(lines, size=512, resize=resize).compute()["error"].isna().all()
    assert read(lines).compute()["error"].isna().all()
    assert len(read(lines, errors="drop", **RESIZED).compute()) == 1


def test_thumbnails_of_lines_are_null(lines):
    ddf = read(lines)
    frame = ddf.images.thumbnails(512, resize="shorter").compute()
    the_line_is_too_large(frame.drop(columns="error"))
    assert frame.dtypes.equals(ddf._meta.dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["synchronous", "threads", "processes"])
def test_every_scheduler_gives_the_same_frame(shards, photos, scheduler):
    with dask.config.set(scheduler=scheduler):
        assert_same_pixels(read(shards).compute(), photos)


def test_compressed_shards_and_folders_read_alike(shards, photos, tmp_path):
    import gzip

    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(shards[0].read_bytes()))
    (tmp_path / "b.tgz").write_bytes(gzip.compress(shards[1].read_bytes()))
    (tmp_path / "c.tar.zst").write_bytes(pa.compress(shards[2].read_bytes(), "zstd", asbytes=True))
    assert_same_pixels(read(tmp_path).compute(), photos)


def test_an_empty_shard_is_an_empty_partition(shards, tmp_path):
    empty = write_tar(tmp_path / "empty.tar", {})
    frame = read([shards[0], empty]).compute()
    assert len(frame) == 8
    alone = read(empty)
    assert len(alone) == 0
    assert alone.compute().dtypes.to_dict() == alone.dtypes.to_dict()


def test_an_unknown_column_is_refused_at_once(shards):
    with pytest.raises(dii.ArgumentError, match="'caption'; the columns of the first shard are"):
        read(shards, columns=["caption"])


@pytest.mark.parametrize(
    "filters",
    [
        [("image", "==", 1)],
        [("caption", "==", "a")],
        [("width", "~", 1)],
        [("width", ">", "wide")],
        [("width", "in", 3)],
        [],
        "width > 3",
    ],
)
def test_a_filter_that_cannot_be_evaluated_is_refused_at_once(shards, filters):
    with pytest.raises(dii.ArgumentError):
        read(shards, filters=filters)


@pytest.mark.parametrize(
    "options",
    [
        {"resize": "crop"},
        {"size": (10, 20), "resize": "shorter"},
        {"size": 0},
        {"size": 1.5},
        {"mode": "CMYK"},
        {"errors": "ignore"},
        {"image": ""},
        {"members": "guess"},
        {"members": {"txt": "strnig"}},
        {"partition_size": "many"},
        {"partition_size": 0},
        {"max_pixels": 0},
        {"transform": 3},
        {"columns": "txt"},
        {"columns": ["txt", "txt"]},
    ],
)
def test_contradictory_arguments_are_refused_at_once(shards, options):
    with pytest.raises(dii.ArgumentError):
        read(shards, **options)


def test_an_unknown_backend_is_refused_at_once(shards):
    with pytest.raises(dii.ArgumentError, match="polars"):
        dii.read_webdataset_images(shards, backend="polars")


def test_a_file_that_is_no_tar_is_refused_at_once(tmp_path, photos):
    path = tmp_path / "a.tar"
    path.write_bytes(photos[0].encoded)
    with pytest.raises(dii.ShardError, match=r"a\.tar"):
        read(path)


def test_a_shard_that_vanishes_is_named(shards, tmp_path):
    paths = [tmp_path / shard.name for shard in shards]
    for path, shard in zip(paths, shards, strict=True):
        path.write_bytes(shard.read_bytes())
    ddf = read(paths)
    paths[1].unlink()
    with pytest.raises(dii.ShardNotFoundError, match=paths[1].name):
        ddf.compute()


def test_a_shard_that_breaks_off_keeps_its_whole_samples(shards, photos, tmp_path):
    path = tmp_path / "cut.tar"
    path.write_bytes(shards[0].read_bytes()[:-30_000])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddf = read(path)
    with pytest.warns(UserWarning, match=r"cut\.tar.*byte"):
        frame = ddf.compute()
    assert 0 < len(frame) < 8
    whole = frame[frame["image"].notna()]
    assert_same_pixels(whole, photos)


def test_automatic_partitions_leave_room_for_shards_larger_than_the_first(tmp_path, monkeypatch):
    """On a large GPU the limit of a column is what counts, and images vary."""
    from dask_image_ingest.frames.pandas_backend import PandasBackend

    def shard(name, height):
        image = Image.fromarray(np.zeros((height, 100, 3), np.uint8))
        return write_tar(tmp_path / name, [(f"{n}.png", encode(image, "png")) for n in range(8)])

    paths = [shard("a.tar", 100), shard("b.tar", 150)]
    limit = 8 * 100 * 100 * 3
    monkeypatch.setattr(PandasBackend, "largest_partition", limit)
    monkeypatch.setattr(PandasBackend, "partition_memory", lambda self: 100 * limit)
    with pytest.raises(MemoryError):
        read(paths, partition_size=None).compute()
    assert len(read(paths).compute()) == 16


def test_empty_shards_in_front_tell_nothing_of_those_that_follow(shards, tmp_path):
    empty = [tmp_path / f"{number}.tar" for number in range(9)]
    for path in empty:
        path.write_bytes(tar({}))
    expected = dii.read_webdataset_images(shards, backend="pandas", partition_size=300_000)
    for count in (1, 9):
        paths = empty[:count] + shards
        found = dii.read_webdataset_images(paths, backend="pandas", partition_size=300_000)
        assert found.columns.tolist() == expected.columns.tolist()
        assert found.npartitions == expected.npartitions + count > len(paths)
        assert found["__key__"].compute().tolist() == expected["__key__"].compute().tolist()


def test_nothing_but_empty_shards_is_an_empty_collection(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.tar").write_bytes(tar({}))
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    assert (len(ddf), ddf.npartitions) == (0, 12)
