"""A row can be a box of a picture: its pixels are a slice of the whole."""

from __future__ import annotations

import io
import json

import corpus
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from counted import work  # noqa: F401
from handmade import exif, insert_after_soi, jpeg_segment
from nvidia.dali import fn
from odd_shards import in_this_process  # noqa: F401
from PIL import Image, ImageOps
from synthetic import photograph
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.references import fetch as fetching
from dask_image_ingest.decode import crash_log
from dask_image_ingest.errors import ArgumentError, ImageDecodeError, PartitionTooLargeError

BOX = pd.ArrowDtype(pa.list_(pa.float64()))


def frame_of(images, boxes):
    """A row for each box: the encoded image, its name, and the box."""
    rows = [
        (name, data, box) for (name, data), some in zip(images, boxes, strict=True) for box in some
    ]
    names, data, boxes = zip(*rows, strict=True)
    return pd.DataFrame(
        {
            "__key__": pd.array(names, "string"),
            "file": pd.array(data, pd.ArrowDtype(pa.binary())),
            "box": pd.array(boxes, BOX),
        }
    )


def by_pillow(data):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def random_box(random, height, width, beyond=0.0):
    """Left, top, right and bottom; up to a share of the edges beyond the picture."""
    ends = [
        np.sort(random.uniform(-beyond * edge, (1 + beyond) * edge, 2)) for edge in (width, height)
    ]
    return [float(end) for pair in zip(*ends, strict=True) for end in pair]


def pixel_box(random, height, width):
    """Left, top, right and bottom of at least one pixel, in the picture."""
    left, top = random.integers(0, width), random.integers(0, height)
    return [left, top, random.integers(left, width) + 1, random.integers(top, height) + 1]


def photographs(random, count):
    """JPEGs of all samplings and orientations, and files of other formats."""
    for number in range(count):
        shape = random.integers(60, 400, 2)
        image = photograph(*shape.tolist(), seed=number)
        kind = ["JPEG", "JPEG", "JPEG", "PNG", "WEBP", "TIFF"][random.integers(6)]
        if kind != "JPEG":
            yield kind, corpus.save(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
            continue
        sampling = int(random.integers(3))
        progressive = bool(random.integers(2))
        data = corpus.save(image, kind, subsampling=sampling, progressive=progressive)
        orientation = jpeg_segment(0xE1, b"Exif\0\0" + exif(int(random.integers(1, 9))))
        yield kind, insert_after_soi(data, orientation)


@pytest.mark.rounds(1, nightly=45)
def test_a_box_has_the_pixels_of_pillows_crop(seed):
    random = np.random.default_rng(seed)
    images = [*photographs(random, 24)]
    wholes = [by_pillow(data) for _, data in images]
    boxes = [
        [random_box(random, *whole.size[::-1], 0.2) for _ in range(random.integers(1, 20))]
        for whole in wholes
    ]
    frame = frame_of(images, boxes)
    frame["number"] = np.repeat(np.arange(len(images)), [*map(len, boxes)])
    frame = frame.sample(frac=1, random_state=seed)
    decoded = dii.decode_images(frame, image="file", box="box", outside="pad")
    for image, number, box, error in zip(
        decoded.images.arrays(), decoded["number"], decoded["box"], decoded["error"], strict=True
    ):
        crop = np.asarray(wholes[number].crop([*box]))
        if image is None:
            assert error.startswith("box: "), error
            assert not crop.any()
        elif 0 in crop.shape:
            assert 1 in image.shape[:2]  # a pixel at least
        else:
            assert np.array_equal(image, crop), (images[number][0], box)


@pytest.mark.filterwarnings("ignore:.* of several pages")
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "labels", "raw"])
def test_every_format_has_the_pixels_of_a_slice(mode):
    random = np.random.default_rng(0)
    images = [*corpus.images().items()]
    whole = dii.decode_images(
        frame_of(images, [[None]] * len(images)), image={"image": "file"}, mode=mode
    )
    arrays = whole.images.arrays()
    boxes = [
        [
            pixel_box(random, *(1, 1) if a is None else a.shape[:2])
            for _ in range(random.integers(1, 4))
        ]
        for a in arrays
    ]
    frame = frame_of(images, boxes)
    decoded = dii.decode_images(frame, image="file", box="box", mode=mode)
    wholes = dict(zip(whole["__key__"], zip(arrays, whole["error"], strict=True), strict=True))
    for key, box, image, error in zip(
        decoded["__key__"], decoded["box"], decoded.images.arrays(), decoded["error"], strict=True
    ):
        expected, why = wholes[key]
        if expected is None:
            assert image is None
            # Values that are no labels are those of the part.
            assert error.partition(":")[0] == why.partition(":")[0]
        else:
            left, top, right, bottom = map(int, box)
            assert np.array_equal(image, expected[top:bottom, left:right]), key
            assert image.dtype == expected.dtype


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    """Shards of photographs with boxes in JSON, left, top, width and height; the photographs."""
    random = np.random.default_rng(3)
    folder, wholes = tmp_path_factory.mktemp("boxed"), {}
    for shard in range(3):
        members = {}
        for number in range(6):
            height, width = random.integers(80, 240, 2).tolist()
            data = corpus.save(photograph(height, width, seed=number), "JPEG", quality=90)
            key = f"{shard}{number}"
            wholes[key] = np.asarray(by_pillow(data))
            boxes = []
            for _ in range(random.integers(1, 9)):
                left, top, right, bottom = pixel_box(random, height, width)
                boxes.append([int(left), int(top), int(right - left), int(bottom - top)])
            eyes = [[box[0], box[1]] for box in boxes]
            label = {"boxes": boxes, "eyes": eyes}
            members |= {f"{key}.jpg": data, f"{key}.json": json.dumps(label).encode()}
        (folder / f"{shard}.tar").write_bytes(tar(members))
    return folder, wholes


def boxes_of(boxed, **options):
    refs = dii.read_webdataset_images(
        str(boxed[0] / "*.tar"), decode=False, json_fields={"boxes": "list<float32[4]>"}, **options
    )
    return refs.explode("json.boxes")


def crops_of(frame, **options):
    return dii.decode_images(frame, box="json.boxes", box_format="xywh", **options)


def check_crops(frame, wholes):
    assert len(frame)
    for key, box, image in zip(
        frame["__key__"], frame["json.boxes"], frame.images.arrays(), strict=True
    ):
        left, top, width, height = map(int, box)
        assert np.array_equal(image, wholes[key][top : top + height, left : left + width])


MOVES = {
    "shuffle": lambda ddf: ddf.shuffle("nbytes"),
    "sort": lambda ddf: ddf.sort_values("height"),
    "sample": lambda ddf: ddf.sample(frac=0.5, random_state=0),
    "filter": lambda ddf: ddf[ddf.height > 150],
    "merge": lambda ddf: ddf.merge(
        ddf[["__key__"]].drop_duplicates().assign(score=1), on="__key__"
    ),
    "repartition": lambda ddf: ddf.repartition(npartitions=5),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_boxes_keep_their_pixels_wherever_their_rows_go(boxed, name, when):
    rows = boxes_of(boxed)
    moved = crops_of(MOVES[name](rows)) if when == "before" else MOVES[name](crops_of(rows))
    check_crops(moved.compute(), boxed[1])


def test_the_bytes_of_a_picture_are_fetched_and_its_header_read_once(boxed, monkeypatch):
    rows = boxes_of(boxed).compute()
    fetched, read = [], []
    fetch, header = fetching.fetch_encoded, fetching.DecodeSpec.read_header

    def counting(references, *args):
        fetched.extend(references)
        return fetch(references, *args)

    def reading(self, data, *args):
        read.append(data)
        return header(self, data, *args)

    monkeypatch.setattr(fetching, "fetch_encoded", counting)
    monkeypatch.setattr(fetching.DecodeSpec, "read_header", reading)
    check_crops(crops_of(rows.sample(frac=1, random_state=1)), boxed[1])
    assert len(fetched) == len(read) == len(boxed[1])


def test_the_part_of_a_box_is_told_and_points_follow_into_it(boxed):
    rows = boxes_of(boxed)
    rows["point"] = rows["json.boxes"].astype(BOX)
    crops = crops_of(rows, margin=0.25, points="point", size=50).compute()
    told = crops[["part.page", "part.top", "part.left", "height", "width"]].to_numpy().tolist()
    for key, box, point, part in zip(
        crops["__key__"], crops["json.boxes"], crops["point"], told, strict=True
    ):
        height, width = boxed[1][key].shape[:2]
        left, top, right, bottom = (
            max(0, round(box[0] - box[2] / 4)),
            max(0, round(box[1] - box[3] / 4)),
            min(width, round(box[0] + box[2] * 5 / 4)),
            min(height, round(box[1] + box[3] * 5 / 4)),
        )
        assert part == [0, top, left, bottom - top, right - left]
        scale = np.array([50 / (right - left), 50 / (bottom - top)])
        moved = np.subtract(box[:2], [left, top]) * scale
        assert np.allclose(point[:2], moved, rtol=1e-5, atol=1e-4)
        assert list(point[2:]) == list(box[2:])


def test_a_crop_of_augment_lies_in_the_box_and_differs_between_boxes(boxed):
    rows = boxes_of(boxed).compute()
    whole = crops_of(rows).images.arrays()
    same = rows.iloc[[0, 0, *range(len(rows))]]
    crop = dii.RandomResizedCrop(scale=(0.2, 0.5), flip=0.5)
    crops = crops_of(same, size=16, augment=crop)
    told = [region.values() for region in crops["image.region"]]
    assert len({(*region, key) for region, key in zip(told, crops["__key__"], strict=True)}) > 10
    first, second = crops.images.arrays()[:2]
    assert np.array_equal(first, second)
    for (top, left, height, width, _), box in zip(told, same["json.boxes"], strict=True):
        assert box[1] <= top <= top + height <= box[1] + box[3]
        assert box[0] <= left <= left + width <= box[0] + box[2]
    # Of the boxes' own pixels, resized, the same regions are the same pixels.
    plain = dii.RandomResizedCrop(scale=(1, 1), ratio=(0.01, 100), flip=0)
    for image, array in zip(
        crops_of(rows, size=16, augment=plain).images.arrays(), whole, strict=True
    ):
        assert abs(image.mean() - array.mean()) < 40


def test_a_senseless_box_costs_its_row_and_says_why(boxed):
    data = corpus.save(photograph(40, 60), "PNG")
    bad = {
        "box: the row has none": None,
        "box: it is not four finite numbers": [1, 2, 3],
        "box: it is not four finite numbers ": [1, 2, 3, float("nan")],
        "box: it is not four finite numbers  ": [1, 2, float("inf"), 4],
        "box: it is empty, 0 wide and 5 high": [3, 0, 3, 5],
        "box: it is empty, -2 wide and 5 high": [3, 0, 1, 5],
        "box: 10 x 5 at 60, 0 lies outside the image, which is 60 x 40": [60, 0, 70, 5],
    }
    frame = frame_of([("a", data)], [[*bad.values(), [0, 0, 1, 1]]])
    decoded = dii.decode_images(frame, image="file", box="box")
    assert decoded["error"].tolist() == [*(text.strip() for text in bad), pd.NA]
    assert [image is None for image in decoded.images.arrays()] == [True] * len(bad) + [False]
    assert len(dii.decode_images(frame, image="file", box="box", errors="drop")) == 1
    beyond = frame_of([("a", data)], [[[50, 30, 70, 50]]])
    for outside, shape in (("clip", (10, 10, 3)), ("pad", (20, 20, 3))):
        (image,) = dii.decode_images(
            beyond, image="file", box="box", outside=outside
        ).images.arrays()
        assert image.shape == shape
    (error,) = dii.decode_images(beyond, image="file", box="box", outside="error")["error"]
    assert error == "box: 20 x 20 at 50, 30 reaches beyond the image, which is 60 x 40"
    with pytest.raises(ImageDecodeError, match="the part 20 x 20 at 50, 30 of the image of"):
        dii.decode_images(
            beyond[["file", "box"]], image="file", box="box", outside="error", errors="raise"
        )


@pytest.mark.parametrize("coordinates", ["pixels", "shares"])
@pytest.mark.parametrize("far", [3e9, 1e300, 1.7e308])
def test_a_box_may_end_anywhere(coordinates, far):
    whole = photograph(40, 60)
    boxes = [[-far, -far, far, far], [0, 0, far, far], [far / 2, 0, far, 5], [-far, 0, 1, 1e-9]]
    frame = frame_of([("a", corpus.save(whole, "PNG"))], [[*boxes, [0, 0, 1, 1]]])
    options = {"image": "file", "box": "box", "coordinates": coordinates}
    clipped = dii.decode_images(frame, **options)
    for number in (0, 1) if far < 1.7e308 else (1,):
        assert np.array_equal(clipped.images.arrays()[number], np.asarray(whole))
    assert "lies outside the image" in clipped["error"][2]
    assert clipped.images.arrays()[3].shape[0] == 1
    padded = dii.decode_images(frame, **options, outside="pad")
    assert padded["error"][1].startswith("too-large: ")
    assert clipped["error"].isna()[4]
    assert padded["error"].isna()[4]
    with pytest.raises(PartitionTooLargeError):
        dii.decode_images(frame, **options, outside="pad", max_pixels=None)


def test_a_box_in_shares_of_a_tile_is_rounded_in_the_tile(boxed):
    refs = dii.read_webdataset_images(str(boxed[0] / "*.tar"), decode=False)
    tiles = refs.images.tiles((45, 42), overlap=(4, 5), edge="drop").compute()
    share = [0.25, 0.1, 0.75, 0.5]
    tiles["box"] = pd.array([share] * len(tiles), BOX)
    crops = dii.decode_images(tiles, box="box", coordinates="shares").images.arrays()
    for tile, crop in zip(dii.decode_images(tiles).images.arrays(), crops, strict=True):
        expected = Image.fromarray(tile).crop(np.multiply(share, [42, 45, 42, 45]).tolist())
        assert np.array_equal(crop, np.asarray(expected))


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad", "shorter", "longer"])
def test_a_part_is_resized_as_an_image_of_its_pixels(resize):
    random = np.random.default_rng(0)
    whole = photograph(200, 150)
    boxes = [pixel_box(random, 200, 150) for _ in range(12)]
    frame = frame_of([("a", corpus.save(whole, "PNG"))], [boxes])
    parts = dii.decode_images(frame, image="file", box="box", size=40, resize=resize)
    crops = [(str(n), corpus.save(whole.crop([*box]), "PNG")) for n, box in enumerate(boxes)]
    images = frame_of(crops, [[None]] * len(crops))
    alone = dii.decode_images(images, image="file", size=40, resize=resize)
    for part, image in zip(parts.images.arrays(), alone.images.arrays(), strict=True):
        assert np.array_equal(part, image)


def test_boxes_in_shares_and_in_boxes(boxed):
    whole = photograph(100, 200)
    frame = frame_of([("a", corpus.save(whole, "PNG"))], [[[0.1, 0.2, 0.5, 0.8]]])
    options = {"image": "file", "box": "box"}
    (image,) = dii.decode_images(frame, **options, coordinates="shares").images.arrays()
    assert np.array_equal(image, np.asarray(whole)[20:80, 20:100])
    refs = dii.read_webdataset_images(str(boxed[0] / "*.tar"), decode=False)
    refs["other"] = refs["image"]
    tiles = refs.images.tiles(60, image="image", edge="drop").compute()
    corners = tiles[["part.top", "part.left"]].to_numpy()
    for box, coordinates in (([6, 12, 30, 48], "pixels"), ([0.1, 0.2, 0.5, 0.8], "shares")):
        tiles["box"] = pd.array([box] * len(tiles), BOX)
        crops = dii.decode_images(tiles, box="box", coordinates=coordinates)
        assert (crops[["part.top", "part.left"]].to_numpy() == np.add(corners, [12, 6])).all()
        arrays = [crops.images[name].arrays() for name in ("image", "other")]
        for key, (top, left), image, other in zip(crops["__key__"], corners, *arrays, strict=True):
            picture = boxed[1][key]
            assert np.array_equal(image, picture[top + 12 : top + 48, left + 6 : left + 30])
            unit = [*picture.shape[1::-1]] * 2 if coordinates == "shares" else 1
            left, top, right, bottom = np.rint(np.multiply(box, unit)).astype(int)
            assert np.array_equal(other, picture[top:bottom, left:right])


def test_what_is_no_box_is_refused(boxed):
    refs = dii.read_webdataset_images(
        str(boxed[0] / "*.tar"), decode=False, json_fields={"boxes": "list<float32[4]>"}
    )
    with pytest.raises(ArgumentError, match=r"frame\.explode\('json\.boxes'\)"):
        crops_of(refs)
    with pytest.raises(ArgumentError, match="four numbers in each row"):
        dii.decode_images(refs, box="__key__")
    with pytest.raises(ArgumentError, match="the frame has"):
        dii.decode_images(refs, box="no")
    for margin in (-0.1, "1", float("nan"), True):
        with pytest.raises(ArgumentError, match="margin="):
            crops_of(boxes_of(boxed), margin=margin)
    with pytest.raises(ArgumentError, match="outside="):
        crops_of(boxes_of(boxed), outside="wrap")
    with pytest.raises(ArgumentError, match="pass box="):
        dii.decode_images(refs, margin=0.1)


def test_limits_are_those_of_the_box(boxed, monkeypatch):
    from dask_image_ingest.frames.pandas_backend import PandasBackend

    data = corpus.save(photograph(300, 400), "JPEG")
    frame = frame_of([("a", data)], [[[0, 0, 100, 50]] * 2 + [[-500, -500, 500, 500]]])
    decoded = dii.decode_images(frame, image="file", box="box", outside="pad", max_pixels=120_000)
    assert decoded["error"].iloc[2].startswith("too-large: 1000 x 1000 is 1,000,000 pixels")
    assert decoded["error"].iloc[:2].isna().all()
    monkeypatch.setattr(PandasBackend, "largest_partition", 100 * 50 * 3 * 3)
    dii.decode_images(frame.iloc[:2], image="file", box="box")
    rows = dd.from_pandas(frame.iloc[[0, 1] * 4], 1, sort=False)
    with pytest.raises(PartitionTooLargeError, match=r"repartition\(npartitions=4 \* frame"):
        dii.decode_images(rows, image={"b": "file"}, box="box").compute()
    several = rows.repartition(npartitions=4 * rows.npartitions)
    parts = dii.decode_images(several, image={"b": "file"}, box="box").partitions
    assert sum(len(part.compute()) for part in parts) == 8


def test_a_loop_over_batches_tells_of_bad_boxes_once(boxed, caplog, monkeypatch):
    monkeypatch.setattr("dask_image_ingest.loader.iter_batches._PIECE_ROWS", 8)
    crops = dii.decode_images(boxes_of(boxed), box="json.boxes", box_format="xyxy", size=32)
    good = int(crops["error"].isna().sum().compute())
    assert 8 < good < len(crops) - 16
    batches = crops.images.iter_batches(4, shuffle=1)
    for _ in range(2):  # a line for each epoch
        caplog.clear()
        assert sum(len(batch["image"]) for batch in batches) == good
        told = [record for record in caplog.records if "could not be decoded" in record.message]
        assert len(told) == 1
        assert "box: it is empty" in told[0].message


def test_a_mask_has_the_random_crop_of_its_image(tmp_path):
    members = {}
    for key in "ab":
        photo = photograph(90, 120, seed=ord(key))
        members |= {
            f"{key}.jpg": corpus.save(photo, "JPEG"),
            f"{key}.seg.png": corpus.save(photo.convert("L"), "PNG"),
        }
    (tmp_path / "a.tar").write_bytes(tar(members))
    rows = dii.read_webdataset_images(
        str(tmp_path / "a.tar"),
        decode=False,
        image={"image": "jpg", "mask": "seg.png"},
    ).compute()
    rows = pd.concat([rows, rows])
    rows["box"] = pd.array([[10, 10, 80, 70], [0, 5, 60, 80], [20, 0, 99, 50], [1, 1, 9, 9]], BOX)
    augment = ["random_resized_crop", "random_horizontal_flip"]
    crops = dii.decode_images(
        rows, image="image", box="box", size=20, augment=augment[0], errors="raise"
    )
    crops = dii.decode_images(
        crops, image="mask", box="box", size=20, augment=augment[0], mode="labels", errors="raise"
    )
    assert crops["image.region"].tolist() == crops["mask.region"].tolist()
    assert len({tuple(region.values()) for region in crops["image.region"]}) == 4


def flipped(images):
    return fn.flip(images, horizontal=1)


@pytest.mark.parametrize(
    "options",
    [
        {"transform": flipped},
        {"augment": dii.RandomHorizontalFlip(1)},
        {"augment": [dii.RandomHorizontalFlip(1), dii.ColorJitter()], "size": 30},
        {"size": 20, "resize": "crop", "interpolation": "bicubic"},
        {"size": 40, "resize": "longer"},
    ],
    ids=["transform", "flip", "pixels", "cubic", "longer"],
)
def test_what_follows_the_decode_sees_the_box_alone(boxed, options):
    rows = boxes_of(boxed).compute()
    plain = crops_of(rows)
    # The crops as files of their own, in the place of the pictures.
    files = plain.images.encode("png").to_frame("png").reset_index(drop=True)
    expected = dii.decode_images(files, image={"image": "png"}, **options).images.arrays()
    found = crops_of(rows, **options).images.arrays()
    jitter = isinstance(options.get("augment"), list)  # is drawn for each sample
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert jitter or abs(one.astype(int) - other).max() <= (2 if "size" in options else 0)


def test_views_of_a_part_are_cut_from_one_decode_of_it(boxed, work):  # noqa: F811
    rows = dii.read_webdataset_images(str(boxed[0] / "*.tar"), decode=False)
    for name in ("image", "height", "width"):
        rows[f"other.{name}".removesuffix(".image")] = rows[name]
    rows = rows.images.tiles(50, image=["image", "other"])
    options = {"size": 24, "augment": "random_resized_crop"}
    both = dii.decode_images(rows, image="image", **options)
    both = dii.decode_images(both, image="other", view=1, **options).compute()
    decoded = work["decoded"]
    alone = dii.decode_images(rows, image="other", view=1, **options).compute()
    assert decoded == len(both) == len(alone)
    assert both["other.region"].tolist() == alone["other.region"].tolist()
    for one, other in zip(
        both.images["other"].arrays(), alone.images["other"].arrays(), strict=True
    ):
        assert np.array_equal(one, other)


@pytest.mark.more
def test_a_box_that_is_decoded_under_guard_has_its_pixels(boxed, monkeypatch):
    rows = boxes_of(boxed).compute().iloc[:4]
    monkeypatch.setattr(crash_log, "has_crashed", lambda: True)
    check_crops(crops_of(rows), boxed[1])


def test_fingerprints_and_the_gallery_know_boxes_apart(boxed):
    rows = boxes_of(boxed)
    for frame in (crops_of(rows), crops_of(rows).compute()):
        hashed = dii.curate.compute_fingerprints(frame, ["bytes"])
        hashes = hashed["fingerprint.bytes"]
        hashes = hashes.compute() if hasattr(hashes, "compute") else hashes
        table = rows[["__key__", "json.boxes"]].compute()
        distinct = {(key, *box) for key, box in zip(*map(table.get, table), strict=True)}
        assert hashes.nunique() == len(distinct)


@pytest.mark.more
def test_a_million_boxes_move_without_a_pixel(tmp_path, monkeypatch):
    photo, random = corpus.save(photograph(60, 80), "JPEG"), np.random.default_rng(0)
    for shard in range(4):
        members = {}
        for number in range(25):
            boxes = json.dumps({"boxes": random.integers(0, 30, (10_000, 4)).tolist()})
            key = f"{shard}{number:02}"
            members |= {f"{key}.jpg": photo, f"{key}.json": boxes.encode()}
        (tmp_path / f"{shard}.tar").write_bytes(tar(members))

    def nothing(*_):
        raise AssertionError("an image was opened")

    monkeypatch.setattr(fetching, "fetch_encoded", nothing)
    rows = boxes_of((tmp_path, None))[["__key__", "image", "json.boxes"]]
    rows["number"] = 1
    assert len(rows) == 1_000_000
    rows = rows[rows["__key__"] != "000"].sample(frac=0.5, random_state=0)
    scores = pd.DataFrame({"__key__": [f"{n // 25}{n % 25:02}" for n in range(100)], "score": 1})
    moved = rows.merge(scores, on="__key__").shuffle("__key__")
    pool = pa.default_memory_pool()
    assert pool.max_memory() < 3e9
    assert moved["number"].sum().compute() == 495_000
