"""The guide's recipes for loops of other libraries: each epoch has its own order, each row once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from pages import blocks
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

torch = pytest.importorskip("torch", reason="pip install -e '.[notebooks]'")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of those libraries
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ddf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    run_path(str(ROOT / "examples" / "photos.py"))["write_shards"](folder)
    return dii.read_webdataset_images(folder, size=224, resize="crop")


def recipe(library):
    (block,) = (
        block.code
        for block in blocks(ROOT / "docs" / "guide" / "train.md")
        if block.code.startswith(f"import {library}\n")
    )
    return compile(block, library, "exec")


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_a_recipe_goes_through_the_epochs_in_their_order(ddf, library, tmp_path, monkeypatch):
    pytest.importorskip(library, reason="pip install -e '.[notebooks]'")
    monkeypatch.chdir(tmp_path)
    seen = []
    forward = torch.nn.Linear.forward

    def noting(layer, images):
        seen.append(images.reshape(len(images), -1).sum(1).tolist())
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Linear, "forward", noting)
    exec(recipe(library), {"torch": torch, "ddf": ddf, "__name__": "recipe"})
    options = {"format": "torch", "columns": [], "shuffle": 0, "normalize": (0.5, 0.5)}
    expected = [
        batch["image"].flatten(1).sum(1).tolist()
        for epoch in range(2)
        for batch in ddf.images.iter_batches(16, epoch=epoch, **options)
    ]
    assert len(expected) == 8
    assert seen == expected


@pytest.mark.more
def test_transformers_goes_on_in_the_middle_of_a_later_epoch(ddf, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[notebooks]'")
    monkeypatch.chdir(tmp_path)
    exec(recipe("transformers"), guide := {"torch": torch, "ddf": ddf, "__name__": "recipe"})
    seen = []

    class Model(guide["Classifier"]):
        def forward(self, image, cls):
            seen.append(image.flatten(1).sum(1).tolist())
            return super().forward(image, cls)

    def train(steps, **resume):
        arguments = transformers.TrainingArguments(
            "steps", max_steps=steps, save_steps=6, report_to="none", use_cpu=True
        )
        guide["Trainer"](Model(), arguments, callbacks=[guide["Epoch"]()]).train(**resume)

    train(6)
    train(8, resume_from_checkpoint="steps/checkpoint-6")
    options = {"format": "torch", "columns": [], "shuffle": 0, "normalize": (0.5, 0.5)}
    assert seen == [
        batch["image"].flatten(1).sum(1).tolist()
        for epoch in range(2)
        for batch in ddf.images.iter_batches(16, epoch=epoch, **options)
    ]


@pytest.mark.parametrize("done", [3, 4], ids=["end of an epoch", "middle"])
def test_lightning_goes_on_with_the_loader_alone(done, tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="pip install -e '.[notebooks]'")
    monkeypatch.chdir(tmp_path)
    frame = lazy_frame([small_frame(range(at, at + 5)) for at in (0, 5, 10, 15)])

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(1, 1)

        def training_step(self, batch, step):
            seen.append(batch["key"].tolist())
            return self.model(batch["key"].float()[:, None]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0)

    def train(steps, workers, checkpoint=None):
        loader = frame.images.dataloader(6, shuffle=0, drop_last=True, num_workers=workers)
        kept = lightning.pytorch.callbacks.ModelCheckpoint(
            ".", every_n_train_steps=done, filename="kept"
        )
        options = {"accelerator": "cpu", "callbacks": [kept], "logger": False}
        trainer = lightning.Trainer(max_steps=steps, enable_progress_bar=False, **options)
        trainer.fit(Model(), loader, ckpt_path=checkpoint)

    seen: list[list[int]] = []
    train(done, 2)
    train(7, 0, "kept.ckpt")
    epochs = (frame.images.iter_batches(6, shuffle=0, epoch=n, drop_last=True) for n in range(3))
    assert seen == [batch["key"].tolist() for epoch in epochs for batch in epoch][:7]


RANK = """
import json, sys
import accelerate
import dask_image_ingest as dii
from small_frames import lazy_frame, small_frame
from torch.utils.data import DataLoader

ddf = lazy_frame([small_frame(range(at, at + 5)) for at in (0, 5, 10, 15)])
accelerator = accelerate.Accelerator(cpu=True)

def prepared(loader):
    try:
        return [batch["key"].tolist() for batch in accelerator.prepare(loader)]
    except dii.ArgumentError as error:
        return str(error)

mix = dii.mix_batches([ddf, ddf], 2, format="torch", columns=["key"])
own = [batch["key"].tolist() for batch in ddf.images.dataloader(2, shuffle=1)]
whole = prepared(ddf.images.dataloader(2, columns=["key"], shuffle=1, shard=None))
refused = [prepared(ddf.images.dataloader(2)), prepared(DataLoader(mix, batch_size=None))]
json.dump([own, whole, refused], open(sys.argv[1], "w"))
"""


def test_accelerate_does_not_divide_the_part_of_a_rank_again(tmp_path):
    pytest.importorskip("accelerate", reason="pip install -e '.[notebooks]'")
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path / str(rank)],
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(280) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    for part in (0, 1):  # as they are; and all rows, which accelerate divides
        keys = [key for answer in answers for batch in answer[part] for key in batch]
        assert sorted(keys) == list(range(20)), part
    for *_, refused in answers:
        assert all("leave this DataLoader out of prepare()" in told for told in refused)


def free_port() -> int:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
