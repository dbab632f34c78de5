"""Scripts of «Coming from …»: a trainer gets what it is used to, and a stopped run goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from pages import blocks
from PIL import Image
from synthetic import write_shard

import dask_image_ingest as dii

torch = pytest.importorskip("torch", reason="pip install -e '.[notebooks]'")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of those libraries
]

ROOT = Path(__file__).parents[2]
ROWS = {"columns": [], "format": "torch", "shuffle": 0, "drop_last": True}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("coming_from") / "demo-data"
    run_path(str(ROOT / "examples" / "photos.py"))["write_shards"](folder)
    return folder


@pytest.fixture
def run(photographs, tmp_path, monkeypatch) -> Callable[[str], dict[str, Any]]:
    """Runs the script of a library, and gives the names that it leaves behind."""
    (tmp_path / "demo-data").symlink_to(photographs)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guide" / "coming_from.md"

    def run(library: str) -> dict[str, Any]:
        (script,) = (b.code for b in blocks(page) if b.code.startswith(f"# From {library}\n"))
        names: dict[str, Any] = {"__name__": "recipe"}
        exec(compile(script, library, "exec"), names)
        return names

    return run


@pytest.fixture
def trained_on(monkeypatch) -> list[list[float]]:
    """Mean of each image of each batch that a convolution of the scripts is trained on."""
    means: list[list[float]] = []
    forward = torch.nn.Conv2d.forward

    def noting(layer, images):
        if layer.training:
            means.append(images.mean((1, 2, 3)).tolist())
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", noting)
    return means


def two_epochs(normalize: Any, augment: Any = "random_resized_crop") -> list[list[float]]:
    """The same of augmented images, two epochs of three steps."""
    ddf = dii.read_webdataset_images("demo-data/*.tar", size=32, augment=augment)
    options = {"columns": [], "format": "torch", "shuffle": 0, "drop_last": True}
    return [
        batch["image"].mean((1, 2, 3)).tolist()
        for epoch in range(2)
        for batch in ddf.images.iter_batches(16, epoch=epoch, normalize=normalize, **options)
    ]


def assert_same(batches: list[list[float]], others: list[list[float]]) -> None:
    assert list(map(len, batches)) == list(map(len, others))
    for batch, other in zip(batches, others, strict=True):
        np.testing.assert_allclose(batch, other, atol=1e-4)


def test_timm_gets_its_pairs(run, trained_on):
    names = run("timm")
    mean, std = names["config"]["mean"], names["config"]["std"]
    assert_same(trained_on, two_epochs((mean, std), names["augment"]))
    assert 0 <= names["right"] <= names["seen"] == 51
    # Resize(36), CenterCrop(32), ToTensor and Normalize, by Pillow.
    frame = dii.read_webdataset_images("demo-data/*.tar").compute()
    photographs = [pixels for pixels in frame.images.arrays() if pixels is not None][:16]
    expected = [(evaluated(pixels) / 255 - mean) / std for pixels in photographs]
    images, labels = next(iter(names["Pairs"](names["test"])))
    assert np.abs(images.permute(0, 2, 3, 1).numpy() - expected).max() < 1.01 / 255 / min(std)
    assert labels.tolist() == frame["cls"].tolist()[:16]


def evaluated(pixels: np.ndarray) -> np.ndarray:
    image = Image.fromarray(pixels)
    shorter = min(image.size)
    size = [int(36 * edge / shorter) for edge in image.size]
    left, top = (round((edge - 32) / 2) for edge in size)
    image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image.crop((left, top, left + 32, top + 32)))


def test_open_clip_gets_images_with_their_captions(run):
    names = run("open_clip")
    data, losses = names["data"]["train"], names["losses"]
    assert (data.num_batches, data.num_samples, len(losses)) == (3, 48, 12)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    frame = dii.read_webdataset_images("demo-data/*.tar", size=8).compute()
    captions = {tuple(line): text for text in frame["txt"] for line in names["tokenize"]([text])}
    data.set_epoch(0)
    options = {"columns": ["txt"], "shuffle": 0, "drop_last": True}
    batches = names["pairs"].images.iter_batches(16, **options)
    for (images, tokens), batch in zip(data, batches, strict=True):
        assert images.shape[1:] == (3, 32, 32)
        assert [captions[tuple(line)] for line in tokens.tolist()] == list(batch["txt"])


def test_lightning_goes_on_in_the_middle_of_an_epoch(run, trained_on):
    pytest.importorskip("lightning", reason="pip install -e '.[notebooks]'")
    run("Lightning")
    assert_same(trained_on, two_epochs((0.5, 0.5)))


def test_accelerate_goes_on_in_the_middle_of_an_epoch(run, trained_on):
    pytest.importorskip("accelerate", reason="pip install -e '.[notebooks]'")
    names = run("accelerate")
    assert_same(trained_on, two_epochs((0.5, 0.5)))
    assert names["seen"] == 51
    assert 0 <= names["accuracy"] <= 1


def test_the_boxes_of_a_detector_are_where_the_objects_are(run, tmp_path):
    write_boxed(tmp_path / "boxed")
    names = run("Ultralytics")
    losses = names["losses"]
    assert np.mean(losses[-6:]) < np.mean(losses[:6])
    boxes = 0
    for batch in map(names["as_yolo"], names["loader"]):
        assert batch["img"].shape[1:] == (3, 64, 64)
        for number, box, label in zip(
            batch["batch_idx"].int(), batch["bboxes"], batch["cls"][:, 0].int(), strict=True
        ):
            # The rectangle's colour is that of its class alone.
            y, x = torch.nonzero(batch["img"][number, label] > 160, as_tuple=True)
            expected = torch.tensor([x.min(), y.min(), x.max() + 1, y.max() + 1]) / 64
            found = torch.cat([box[:2] - box[2:] / 2, box[:2] + box[2:] / 2])
            assert (found - expected).abs().max() < 2 / 64
            boxes += 1
    assert 30 <= boxes <= 36  # of others the random crop has less than a fifth


def write_boxed(folder: Path) -> None:
    """Grey images of 96 x 128, of which three of four have a rectangle of the class's colour."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(3):
        members: dict[str, bytes] = {}
        for number in range(16):
            pixels = random.integers(70, 100, (96, 128, 3), np.uint8)
            boxes, classes = [], []
            if number % 4:
                (top, left), (height, width) = random.integers(4, 48, 2), random.integers(20, 40, 2)
                boxes.append([left, top, left + width, top + height])
                classes.append(number % 3)
                pixels[top : top + height, left : left + width, number % 3] = 240
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            told = {"boxes": np.array(boxes).tolist(), "classes": classes}
            members |= {
                f"{number}.png": file.getvalue(),
                f"{number}.json": json.dumps(told).encode(),
            }
        write_shard(folder / f"{shard}.tar", members)
