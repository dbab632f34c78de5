"""Training with batches by DLPack, timed: a model of torch on the GPU that decodes.

Prints images per second of the loop, of the model alone (one batch over and over), and of the
batches alone. If the loop is as fast as the slower of the two, they overlap. It has not run yet.

    python tests/gpu/training.py --images 4096
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests" / "support")]

BATCH = 128


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=4096, help="how many (4096)")
    arguments = parser.parse_args()
    import torch
    from synthetic import write_shards

    import dask_image_ingest as dii

    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), 8, arguments.images // 8, size=(375, 500), distinct=16)
        ddf = dii.read_webdataset_images(paths, size=224, backend="cudf")

        def batches():
            return ddf.images.iter_batches(BATCH, format="torch", columns=[], drop_last=True)

        step = training_step(torch)
        first = next(batches())["image"]
        assert first.is_cuda, first.device
        for _ in range(3):
            step(first)
        steps = arguments.images // BATCH
        tell(torch, "model alone", (step(first) for _ in range(steps)))
        tell(torch, "batches alone", batches())
        tell(torch, "training", (step(batch["image"]) for batch in batches()))
        print(f"memory: torch {torch.cuda.max_memory_reserved() / 1e9:.1f} GB", flush=True)


def training_step(torch):
    """A step of a small convolutional network."""
    layers = [
        layer
        for one, other in itertools.pairwise((3, 64, 128, 256, 512))
        for layer in (torch.nn.Conv2d(one, other, 3, stride=2), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(images):
        optimizer.zero_grad()
        loss = model(images.permute(0, 3, 1, 2).float() / 255).square().mean()
        loss.backward()
        optimizer.step()

    return step


def tell(torch, name, steps):
    """Images per second of some steps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    count = sum(1 for _ in steps)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(f"{name}: {count * BATCH / seconds:,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
