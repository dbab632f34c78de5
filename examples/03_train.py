"""Train on shards: a torch loop with random crops that can be stopped, on one process or several.

    python examples/03_train.py [FOLDER]
    torchrun --nproc-per-node 2 examples/03_train.py [FOLDER]

Reads the photographs of ``photos.py`` from FOLDER (default: demo-data, written if need be) and
learns to tell which photograph a crop was cut from. Needs torch: pip install torch==2.13.0

Step i has the same images for any number of processes: each takes its part. Every few steps the
weights are stored together with the position in the data; a run that finds such a file goes on from
there, on any number of processes. On a CPU two worker processes decode while the model learns. On a
GPU there are none: with cuDF installed the pixels are decoded on the GPU, and the batches are CUDA
tensors, normalised there. ``.to(device)`` below then copies nothing.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from photos import write_shards
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import dask_image_ingest as dii

EPOCHS, BATCH, SIZE, CLASSES = 6, 16, 48, 13
MEAN_AND_STD = (0.5, 0.5)  # of values from 0 to 1: the network gets -1 to 1
STORED_EVERY = 2  # steps


def main(folder: str = "demo-data") -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.init_process_group()
    is_first = not distributed.is_initialized() or distributed.get_rank() == 0
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if is_first:
        write_shards(Path(folder))
    if world > 1:
        distributed.barrier()
    network = small_network().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    stored = Path(folder) / "model.pt"
    position = None
    if stored.exists():
        state = torch.load(stored, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        position = state["position"]
    model = DistributedDataParallel(network) if world > 1 else network

    # A part of the image, of random place and size, and its mirror image half of the time: another
    # one in each epoch.
    ddf = dii.read_webdataset_images(
        f"{folder}/*.tar", size=SIZE, augment=dii.RandomResizedCrop(scale=(0.5, 1))
    )
    loader = ddf.images.dataloader(
        BATCH // world,
        columns=["cls"],
        shuffle=0,
        normalize=MEAN_AND_STD,
        drop_last=True,
        start=position or 0,
        num_workers=0 if device == "cuda" else 2,
    )
    for epoch in range(position[0] if position else 0, EPOCHS):
        loader.dataset.set_epoch(epoch)
        losses, right, seen = [], 0, 0
        for step, batch in enumerate(loader, 1):
            labels = batch["cls"].to(device)
            scores = model(batch["image"].to(device))
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += int((scores.argmax(1) == labels).sum())
            seen += len(labels)
            if is_first and step % STORED_EVERY == 0:
                # Workers are ahead of the model: only this loop knows how many batches it has seen.
                position = list(loader.dataset.position_after(step))
                store(stored, network, optimizer, position)
        if is_first and losses:
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch + 1}: loss {mean:.2f}, {right} of {seen} right")
    if is_first:
        stored.unlink(missing_ok=True)
        torch.save(network.state_dict(), Path(folder) / "trained.pt")
    if world > 1:
        distributed.destroy_process_group()


def store(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: list[Any]
) -> None:
    """Write what a stopped run needs, whole or not at all."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": position,
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def small_network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


if __name__ == "__main__":
    main(*sys.argv[1:])
