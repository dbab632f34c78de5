"""Boxes and points follow the decode: they lie where the pixels do, and as torchvision's do."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.decode import Origin
from dask_image_ingest.decode.random_crop import draw_region
from dask_image_ingest.errors import ArgumentError

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

FIELDS = {"boxes": "list<list<float32>>", "labels": "list<int64>", "points": "list<float32[2]>"}
FOLLOW = {"boxes": "json.boxes", "box_labels": "json.labels", "points": "json.points"}
CROP = dii.RandomResizedCrop(scale=(0.2, 0.9))

WAYS = {
    "random": {"size": (70, 90), "augment": CROP},
    "flip": {"size": 70, "resize": "shorter", "augment": "random_horizontal_flip"},
    "crop and flip": {"size": 80, "augment": [CROP, dii.RandomHorizontalFlip()]},
    "crop": {"size": (80, 60), "resize": "crop"},
    "two steps": {"size": 64, "resize": "crop", "crop_from": 80},
    "pad": {"size": 90, "resize": "pad"},
    "shorter": {"size": 70, "resize": "shorter"},
    "longer": {"size": 90, "resize": "longer"},
    "stretch": {"size": (50, 101)},
    "whole": {},
}
SOME = {name: WAYS[name] for name in ("random", "two steps", "pad")}


def drawn(random, number):
    """A picture with a rectangle in each channel, these as boxes, and a mask of the first."""
    height, width = random.integers(60, 200, 2)
    boxes = []
    pixels = np.zeros((height, width, 3), np.uint8)
    for channel in range(3):
        top, left = random.integers(0, height - 20), random.integers(0, width - 20)
        bottom, right = top + random.integers(18, 60), left + random.integers(18, 60)
        bottom, right = min(bottom, height), min(right, width)
        pixels[top:bottom, left:right, channel] = 255
        boxes.append([int(left), int(top), int(right), int(bottom)])
    image, file, mask = Image.fromarray(pixels), io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels[..., 0] // 255).save(mask, "png")
    if number % 2:
        image.save(file, "png")
        return "png", file.getvalue(), boxes, mask.getvalue()
    if number % 4:  # stored on its side, and turned by its EXIF
        exif = Image.Exif()
        exif[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(
            file, "jpeg", quality=98, subsampling=0, exif=exif
        )
    else:
        image.save(file, "jpeg", quality=98, subsampling=0)
    return "jpg", file.getvalue(), boxes, mask.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    random, folder = np.random.default_rng(5), tmp_path_factory.mktemp("boxes")
    paths = []
    for shard in range(2):
        members = {}
        for number in range(12):
            extension, data, boxes, mask = drawn(random, number)
            corners = [[x, y] for x0, y0, x1, y1 in boxes for x, y in ((x0, y0), (x1, y1))]
            fields = {"boxes": boxes, "labels": [0, 1, 2], "points": corners}
            key = f"{shard}{number:03d}"
            members[f"{key}.{extension}"] = data
            members[f"{key}.seg.png"] = mask
            members[f"{key}.json"] = json.dumps(fields).encode()
        write_tar(path := folder / f"{shard}.tar", members)
        paths.append(str(path))
    return paths


def read(shards, **options):
    return dii.read_webdataset_images(
        shards, json_fields=FIELDS, **{"backend": "pandas", **FOLLOW, **options}
    )


def extent(channel):
    """The box of the bright pixels of a channel; None if there is hardly one."""
    rows, columns = (np.flatnonzero((channel > 127).any(axis=axis)) for axis in (1, 0))
    if min(len(rows), len(columns)) < 2:
        return None
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def check_rows(rows):
    """The boxes of (image, boxes, labels) are those of the pixels; the number of boxes."""
    count = 0
    for image, boxes, labels in rows:
        assert len(boxes) == len(labels)
        found = dict(zip(np.asarray(labels).tolist(), boxes, strict=True))
        for channel in range(3):
            seen, box = extent(image[..., channel]), found.get(channel)
            if box is None:
                assert seen is None
            elif seen is not None:
                assert np.abs(np.subtract(seen, box)).max() <= 1.1
                count += 1
    return count


def rows_of(frame):
    return zip(frame.images.arrays(), frame["json.boxes"], frame["json.labels"], strict=True)


@pytest.mark.parametrize("way", WAYS)
def test_boxes_lie_where_the_pixels_do(shards, way):
    assert check_rows(rows_of(read(shards, **WAYS[way]).compute())) > 30


@pytest.mark.parametrize("way", SOME)
def test_boxes_follow_after_moves_and_in_each_epoch(shards, way):
    ddf = read(shards, **SOME[way])
    assert check_rows(rows_of(ddf.shuffle("__key__", npartitions=3).compute())) > 30
    references = read(shards, decode=False, **dict.fromkeys(FOLLOW))
    late = dii.decode_images(references.sample(frac=1, random_state=1), **FOLLOW, **SOME[way])
    assert check_rows(rows_of(late.compute())) > 30
    names = ["json.boxes", "json.labels", "__key__"]
    epochs = []
    for epoch in range(2):
        batches = ddf.images.iter_batches(5, columns=names, shuffle=3, epoch=epoch)
        batches = list(batches)
        for batch in batches:
            check_rows(zip(batch["image"], batch["json.boxes"], batch["json.labels"], strict=True))
        pairs = (
            (k, b) for batch in batches for k, b in zip(*map(batch.get, names[2::-2]), strict=True)
        )
        epochs.append(dict(pairs))
    different = sum(not np.array_equal(epochs[0][key], epochs[1][key]) for key in epochs[0])
    assert different > 15 if way == "random" else not different


def by_torchvision(tv_tensors, functional, options, region, height, width, boxes, points):
    """The arrays after the steps of torchvision's RandomResizedCrop, Resize and CenterCrop."""
    import torch

    canvas = {"canvas_size": (height, width)}
    items = [
        tv_tensors.BoundingBoxes(
            torch.tensor(np.array(boxes), dtype=torch.float32), format="XYXY", **canvas
        ),
        tv_tensors.KeyPoints(torch.tensor(np.array(points), dtype=torch.float32), **canvas),
    ]
    for place, item in enumerate(items):
        if region is not None:
            top, left, rows, columns, flipped = region
            item = functional.resized_crop(item, top, left, rows, columns, list(options["size"]))
            item = functional.horizontal_flip(item) if flipped else item
        else:
            item = functional.resize(item, [options["crop_from"]])
            item = functional.center_crop(item, [options["size"]] * 2)
        items[place] = item.as_subclass(torch.Tensor).numpy()
    return items


@pytest.mark.parametrize("way", ["random", "two steps"])
def test_boxes_and_points_are_those_of_torchvision(shards, way):
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    stored = read(shards, **dict.fromkeys(FOLLOW)).compute()
    ddf = read(shards, **WAYS[way], box_labels=None, min_visibility=0)
    frame = ddf.compute()
    regions = frame["image.region"] if way == "random" else [None] * len(frame)
    for row, region in enumerate(regions):
        before = stored.iloc[row]
        boxes, points = by_torchvision(
            tv_tensors, functional, WAYS[way], region and list(region.values()),
            before.height, before.width, before["json.boxes"], before["json.points"],
        )  # fmt: skip
        ours = np.array(frame["json.boxes"].iloc[row])
        boxes[(boxes[:, 2:] <= boxes[:, :2]).any(axis=1)] = 0  # nothing is left of these
        np.testing.assert_allclose(ours, boxes, rtol=1e-5, atol=2e-5)
        moved = np.array(frame["json.points"].iloc[row])
        np.testing.assert_allclose(moved, points, rtol=1e-5, atol=2e-5)


def test_a_region_is_told_without_a_decode(shards, work):  # noqa: F811
    ddf = read(shards, **WAYS["random"])
    told = ddf[["__key__", "height", "width", "image.region", "json.boxes"]].compute()
    assert work["decoded"] == 0
    whole = ddf.compute()
    assert told["image.region"].tolist() == whole["image.region"].tolist()
    assert told["json.boxes"].tolist() == whole["json.boxes"].tolist()
    columns = ["height", "width", "image.region"]
    batches = list(ddf.images.iter_batches(4, columns=columns, shuffle=0, epoch=1))
    regions = [region for batch in batches for region in batch["image.region"]]
    edges = [
        edge for batch in batches for edge in zip(batch["height"], batch["width"], strict=True)
    ]
    assert len({tuple(region.values()) for region in regions}) > 20
    for region, (height, width) in zip(regions, edges, strict=True):
        assert region["top"] + region["height"] <= height
        assert region["left"] + region["width"] <= width


def parquet_of(tmp_path, boxes, type_, **columns):
    file = io.BytesIO()
    Image.fromarray(np.full((100, 200, 3), 7, np.uint8)).save(file, "png")
    count = len(boxes)
    table = {"image": [file.getvalue()] * count, "boxes": pa.array(boxes, type_), **columns}
    pq.write_table(pa.table(table), path := tmp_path / "boxes.parquet")
    return str(path)


INNER = pa.list_(pa.list_(pa.float32()))


def test_boxes_that_leave_go_with_their_labels_or_become_zeros(tmp_path):
    # The square in the middle, resized to half: x from 50 to 150.
    boxes = [[[0, 0, 40, 40], [40, 0, 60, 100], [100, 20, 140, 60, 9]], [], None]
    names, parts = [["a", "b", "c"], [], ["x"]], [[[[1, 2]], [], [[100, 50], [0, 0]]], [], None]
    deep = pa.array(parts, pa.list_(INNER))
    path = parquet_of(tmp_path, boxes, INNER, names=names, parts=deep)
    half = {"size": 50, "resize": "crop", "boxes": "boxes"}

    def columns(**options):
        frame = dii.read_parquet_images(path, backend="pandas", **half, **options).compute()
        return [json.loads(pa.array(frame[name]).to_pandas().to_json(orient="values"))
                for name in ("boxes", "names", "parts")]  # fmt: skip

    zeros = [[[0, 0, 0, 0], [0, 0, 5, 50], [25, 10, 45, 30, 9]], [], None]
    assert columns() == [zeros, names, parts]
    follow = {"box_labels": ["names", "parts"], "points": "parts"}
    left = [[[0, 0, 5, 50], [25, 10, 45, 30, 9]], [], None]
    assert columns(**follow) == [
        left,
        [["b", "c"], [], None],
        [[[], [[25, 25], [-25, 0]]], [], None],
    ]
    inside = [[[25, 10, 45, 30, 9]], [], None]
    assert columns(**follow, min_visibility=0.6)[:2] == [inside, [["c"], [], None]]
    assert columns(**follow, min_visibility=0.5)[0] == left


@pytest.mark.parametrize(
    ("box", "type_", "options", "wanted"),
    [
        ([100, 20, 40, 40], pa.list_(pa.list_(pa.int64())), {"box_format": "xywh"},
         [25, 10, 20, 20]),
        ([0.5, 0.2, 0.7, 0.6], pa.list_(pa.list_(pa.float64(), 4)), {"coordinates": "shares"},
         [0.5, 0.2, 0.9, 0.6]),
        ([0.5, 0.2, 0.2, 0.4], pa.large_list(pa.list_(pa.float32())),
         {"coordinates": "shares", "box_format": "xywh"}, [0.5, 0.2, 0.4, 0.4]),
    ],
)  # fmt: skip
def test_boxes_of_each_format_and_type(tmp_path, box, type_, options, wanted):
    path = parquet_of(tmp_path, [[box, box], None, [box]], type_)
    ddf = dii.read_parquet_images(
        path, backend="pandas", size=50, resize="crop", boxes="boxes", **options
    )
    frame = ddf.compute()
    assert frame["boxes"].dtype == ddf["boxes"].dtype
    assert frame["boxes"].isna().tolist() == [False, True, False]
    np.testing.assert_allclose(frame["boxes"].iloc[0], [wanted] * 2, rtol=1e-6)


def test_what_is_no_box_is_null_and_costs_one_row(tmp_path):
    boxes = [[[1, 2, 3]], [[60, 20, 80, 40], None], [[60, 20, 80, 40]], [[60, 20, 80, None]]]
    path = parquet_of(tmp_path, boxes, INNER, names=[["a"], ["a", "b"], ["a"], ["a"]])
    ddf = dii.read_parquet_images(path, backend="pandas", boxes="boxes", box_labels="names")
    frame = ddf.compute()
    assert frame["boxes"].isna().tolist() == [True, True, False, True]
    assert frame["names"].isna().tolist() == [True, True, False, True]
    path = parquet_of(tmp_path, boxes[2:3] * 2, INNER, names=[["a"], ["a", "b"]])
    frame = dii.read_parquet_images(path, backend="pandas", boxes="boxes", box_labels="names")
    assert frame.compute()["names"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"boxes": "json.box"}, "json_fields="),
        ({"box_format": "cxcywh"}, "choose 'xyxy' or 'xywh'"),
        ({"min_visibility": 2}, "0 to 1"),
        ({"min_visibility": "half"}, "0 to 1"),
        ({"boxes": None}, "pass boxes= too"),
        ({"boxes": "json", "box_labels": None}, "lists of four numbers"),
        ({"boxes": "json.points"}, "is one of points="),
        ({"box_labels": "__key__"}, "an item for each box"),
        ({"augment": "rand_augment"}, "leave one of them out"),
        ({"decode": False}, "pass them to decode_images"),
        ({"points": "__key__"}, "lists of two numbers"),
    ],
)
def test_columns_that_are_no_boxes_are_refused(shards, options, told):
    with pytest.raises(ArgumentError, match=told):
        read(shards, **options)


def test_images_of_one_member_are_views_and_masks_follow_them(shards):
    options = {"size": 64, "augment": CROP, **dict.fromkeys(FOLLOW)}
    mask = dii.ImageColumn("seg.png", mode="labels")
    image = {"image": "jpg;png", "mask": mask, "second": "png;jpg", "mask2": mask}
    ddf = read(shards, image=image, **options)
    names = ["image.region", "second.region"]
    for shuffle in (None, 1):
        columns = ["mask", "second", "mask2", *names]
        batches = list(ddf.images.iter_batches(8, columns=columns, shuffle=shuffle))
        get = lambda name, batches=batches: [row for batch in batches for row in batch[name]]  # noqa: E731
        assert sum(a == b for a, b in zip(*map(get, names), strict=True)) <= 1
        for picture, labels in (("image", "mask"), ("second", "mask2")):
            for pixels, classes in zip(get(picture), get(labels), strict=True):
                seen, box = extent(pixels[..., 0]), extent(classes[..., 0] * 255)
                if seen is not None and box is not None:
                    assert np.abs(np.subtract(seen, box)).max() <= 2
    # The regions of columns that are decoded apart.
    references = read(shards, decode=False, **dict.fromkeys(FOLLOW)).compute()
    late = dii.decode_images(references, size=64, augment=CROP, view=1)
    alone = ddf[["second.region"]].compute()
    assert late["image.region"].tolist() == alone["second.region"].tolist()


def test_a_region_is_that_of_the_draw(shards):
    frame = read(shards[:1], **WAYS["random"])[["height", "width", "image.region"]].compute()
    for number, row in enumerate(frame.itertuples(index=False)):
        region = draw_region(CROP, row.height, row.width, Origin(shards[0], number, ""))
        assert tuple(row[2].values()) == region


def test_boxes_follow_into_buckets_and_past_images_that_are_dropped(shards, tmp_path):
    names = ["json.boxes", "json.labels"]
    for options in ({}, {"size": 60, "augment": CROP}):
        ddf = read(shards, **options)
        batches = ddf.images.iter_batches(
            5, columns=[*names, "height", "width"], shuffle=2, buckets=[(64, 96), (96, 64)]
        )
        count = 0
        for batch in batches:
            count += check_rows(zip(batch["image"], *map(batch.get, names), strict=True))
        assert count > 20
    members = {}
    for number in range(6):
        extension, data, boxes, _ = drawn(np.random.default_rng(number), number)
        members[f"{number}.{extension}"] = data[: 60 if number in (1, 4) else None]
        fields = {"boxes": boxes, "labels": [0, 1, 2], "points": []}
        members[f"{number}.json"] = json.dumps(fields).encode()
    path = write_tar(tmp_path / "bad.tar", members)
    frame = read(path, errors="drop", **WAYS["crop"]).compute()
    assert check_rows(rows_of(frame)) > 3
    assert len(frame) == 4
