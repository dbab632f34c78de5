"""Train on shards: a small torch loop over ``iter_batches``.

    python examples/03_train.py [FOLDER]

Reads the photographs of ``photos.py`` from FOLDER (default: demo-data, written if need be) and
learns to tell which photograph a crop was cut from. Needs torch: pip install torch==2.13.0

On a GPU nothing changes but the device: with cuDF installed the pixels are decoded on the GPU, and
the batches are CUDA tensors over the memory that they were decoded into. ``.to(device)`` below
then copies nothing.
"""

import sys
from pathlib import Path

import torch
from photos import write_shards
from torch import nn

import dask_image_ingest as dii

EPOCHS, BATCH, SIZE, CLASSES = 6, 16, 48, 13


def main(folder: str = "demo-data") -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_shards(Path(folder))
    ddf = dii.read_webdataset_images(f"{folder}/*.tar", size=SIZE, resize="crop")
    model = small_network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        # A seed is an order: partitions come in another one, and rows are mixed across them.
        batches = ddf.images.iter_batches(BATCH, "torch", columns=["cls"], shuffle=epoch)
        losses, right, seen = [], 0, 0
        for batch in batches:
            images = as_input(batch["image"], device)
            labels = batch["cls"].to(device)
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += int((scores.argmax(1) == labels).sum())
            seen += len(labels)
            # Stored with the weights, it is where a killed run goes on: iter_batches(start=...).
            state = {"model": model.state_dict(), "epoch": epoch, "position": batches.position}
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.2f}, {right} of {seen} right")
    torch.save(state, Path(folder) / "model.pt")


def small_network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def as_input(images: torch.Tensor, device: str) -> torch.Tensor:
    """Batches share the partition's memory: this makes floats of it and writes nothing to it."""
    return images.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1


if __name__ == "__main__":
    main(*sys.argv[1:])
