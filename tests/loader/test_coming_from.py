"""The scripts of «Coming from …» for trainers: each row once an epoch, and a stopped run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
from pages import blocks
from PIL import Image

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


def two_epochs(normalize: Any) -> list[list[float]]:
    """The same of random crops, two epochs of three steps."""
    ddf = dii.read_webdataset_images("demo-data/*.tar", size=32, augment="random_resized_crop")
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
    assert_same(trained_on, two_epochs((mean, std)))
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
    pytest.importorskip("torchdata", reason="pip install -e '.[notebooks]'")
    run("Lightning")
    assert_same(trained_on, two_epochs((0.5, 0.5)))


def test_accelerate_goes_on_in_the_middle_of_an_epoch(run, trained_on):
    pytest.importorskip("accelerate", reason="pip install -e '.[notebooks]'")
    names = run("accelerate")
    assert_same(trained_on, two_epochs((0.5, 0.5)))
    assert names["seen"] == 51
    assert 0 <= names["accuracy"] <= 1
