"""Train on shards: a small torch loop over a ``dataloader``.

    python examples/03_train.py [FOLDER]

Reads the photographs of ``photos.py`` from FOLDER (default: demo-data, written if need be) and
learns to tell which photograph a crop was cut from. Needs torch: pip install torch==2.13.0

On a CPU two worker processes decode while the model learns; they share the shards, and each image
comes once. On a GPU there are none: with cuDF installed the pixels are decoded on the GPU, and the
batches are CUDA tensors, normalised there. ``.to(device)`` below then copies nothing.
"""

import sys
from pathlib import Path

import torch
from photos import write_shards
from torch import nn

import dask_image_ingest as dii

EPOCHS, BATCH, SIZE, CLASSES = 6, 16, 48, 13
MEAN_AND_STD = (0.5, 0.5)  # of values from 0 to 1: the network gets -1 to 1


def main(folder: str = "demo-data") -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_shards(Path(folder))
    ddf = dii.read_webdataset_images(f"{folder}/*.tar", size=SIZE, resize="crop")
    model = small_network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    workers = 0 if device == "cuda" else 2
    loader = ddf.images.dataloader(
        BATCH, columns=["cls"], shuffle=0, normalize=MEAN_AND_STD, num_workers=workers
    )
    for epoch in range(EPOCHS):
        # Each has its order: partitions come in another one, and rows are mixed across them.
        loader.dataset.set_epoch(epoch)
        losses, right, seen = [], 0, 0
        for batch in loader:
            labels = batch["cls"].to(device)
            scores = model(batch["image"].to(device))
            loss = nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += int((scores.argmax(1) == labels).sum())
            seen += len(labels)
            # Stored with the weights, it is where a killed run goes on: load_state_dict().
            # Of worker processes it knows where the epoch began: torchdata's StatefulDataLoader
            # knows the batch too.
            state = {"model": model.state_dict(), "data": loader.dataset.state_dict()}
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.2f}, {right} of {seen} right")
    torch.save(state, Path(folder) / "model.pt")


def small_network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


if __name__ == "__main__":
    main(*sys.argv[1:])
