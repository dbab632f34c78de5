"""Boxes of pictures have the same pixels on a GPU as with pandas."""

import json

import numpy as np
import pytest
from contract import on_host, to_arrow
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii

BOXES = {
    "stored": {},
    "resized": {"size": 32},
    "padded": {"outside": "pad", "margin": 0.5},
    "padded and resized": {"outside": "pad", "margin": 0.5, "size": 24, "resize": "pad"},
    "in shares": {"coordinates": "shares", "box_format": "xyxy"},
    "random": {"size": 16, "augment": "random_resized_crop"},
    "grey": {"mode": "L"},
    "stored values": {"mode": "raw"},
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    random = np.random.default_rng(5)
    members = {}
    for n in range(10):
        height, width = random.integers(40, 120, 2).tolist()
        extension = "png" if n % 3 == 2 else "jpg"
        members[f"{n:03}.{extension}"] = encode(photograph(height, width, n), extension)
        boxes = []
        for _ in range(n % 4 + 1):
            left, top = random.integers(0, width - 9), random.integers(0, height - 9)
            boxes.append([*map(int, (left, top, *random.integers(4, 60, 2)))])
        shares = [[0.25, 0.125, 0.75, 0.5]] * len(boxes)
        members[f"{n:03}.json"] = json.dumps({"boxes": boxes, "shares": shares}).encode()
    return write_shard(tmp_path_factory.mktemp("shards") / "boxes.tar", members)


@pytest.mark.parametrize("name", BOXES)
def test_boxes_have_the_pixels_that_they_have_with_pandas(shard, name):
    options = {"box_format": "xywh", **BOXES[name]}
    box = "json.shares" if "coordinates" in options else "json.boxes"
    frames = []
    for backend in ("pandas", "cudf"):
        fields = {"boxes": "list<list<float32>>", "shares": "list<list<float32>>"}
        rows = dii.read_webdataset_images(
            str(shard), decode=False, json_fields=fields, backend="pandas"
        )
        # Dask's `explode` gives cuDF a list of columns, which it does not take.
        rows = rows.explode(box).to_backend(backend)
        frames.append(dii.decode_images(rows, box=box, **options).compute())
    expected, ours = (
        [image if image is None else on_host(image) for image in frame.images.arrays()]
        for frame in frames
    )
    assert len(ours) > 20
    loose = 50 if "size" in options else 1  # of a resize to so few pixels, and of grey
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            apart = abs(one.astype(int) - other)
            assert apart.max() <= loose
            assert apart.mean() < 1
    errors = [to_arrow(frame[["error"]]).column(0).to_pylist() for frame in frames]
    assert errors[0] == errors[1]
