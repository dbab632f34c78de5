"""The notebooks and the training script run from top to bottom, and show what they promise."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dask_image_ingest as dii

pytestmark = [pytest.mark.packaging, pytest.mark.torch]

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
ENVIRONMENT = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}

WHY = "pip install -e '.[notebooks]'"


def test_notebooks_are_small_and_show_their_outputs():
    nbformat = pytest.importorskip("nbformat", reason=WHY)
    assert [path.name for path in NOTEBOOKS] == [
        "01_explore.ipynb",
        "02_embed.ipynb",
        "05_curate.ipynb",
    ]
    for path in NOTEBOOKS:
        assert path.stat().st_size < 1_000_000
        notebook = nbformat.read(path, 4)
        nbformat.validate(notebook)
        assert "data:image/jpeg;base64" in path.read_text()
        assert "On a GPU" in notebook.cells[-1].source
        assert "/tmp/" not in path.read_text()


@pytest.mark.filterwarnings("default")  # Jupyter's own packages warn of each other
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason=WHY)
    nbformat = pytest.importorskip("nbformat", reason=WHY)
    pytest.importorskip("ipykernel", reason=WHY)
    if "torch" in path.read_text():
        pytest.importorskip("efficientnet_lite_pytorch", reason=WHY)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    notebook = nbformat.read(path, 4)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    html = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert html.count("data:image/jpeg;base64") >= 10
    if path.stem == "01_explore":
        assert "truncated" in html
        assert "0018" in text
    elif path.stem == "05_curate":
        left = re.search(r"of the 117 that were planted: (\d+)", text)
        assert left is not None
        assert int(left[1]) <= 16  # 13 of them cuts, which are other pictures to a hash
    else:
        right = re.search(r"(\d+)% of 51", text)
        assert right is not None
        assert int(right[1]) >= 95


def test_training_learns(tmp_path):
    pytest.importorskip("torch", reason=WHY)
    finished = subprocess.run(
        [sys.executable, EXAMPLES / "03_train.py"],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", finished.stdout)]
    seen = re.findall(r"of (\d+) right", finished.stdout)
    assert set(seen) <= {"47", "48"}  # of 51: full steps only, one with a bad image or none
    assert losses[-1] < losses[0] / 1.5
    assert (tmp_path / "demo-data" / "trained.pt").exists()


# Trains as the example does, but notes the images of each step, and dies before one of them.
INTERRUPTED = """
import hashlib, os, runpy, signal, sys
import torch

example, noted, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
main = runpy.run_path(example, run_name="example")["main"]
network = main.__globals__["small_network"]

class Noting(torch.nn.Module):
    steps = 0

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, images):
        self.steps += 1
        if self.steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
        digests = [hashlib.md5(image.numpy().tobytes()).hexdigest() for image in images]
        with open(noted, "a") as file:
            print(*digests, file=file)
        return self.network(images)

main.__globals__.update(small_network=Noting, EPOCHS=3, STORED_EVERY=1)
main()
"""


def test_training_that_is_killed_sees_each_row_of_each_epoch_once(tmp_path):
    pytest.importorskip("torch", reason=WHY)
    noted = tmp_path / "noted"
    for last, status in ((2, -signal.SIGKILL), (5, -signal.SIGKILL), (0, 0)):
        finished = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, EXAMPLES / "03_train.py", noted, str(last)],
            cwd=tmp_path,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert finished.returncode == status, finished.stderr
    steps = [line.split() for line in noted.read_text().splitlines()]
    # The crops of an image are others in each epoch. In one process, without workers:
    ddf = dii.read_webdataset_images(
        tmp_path / "demo-data", size=48, augment=dii.RandomResizedCrop(scale=(0.5, 1))
    )
    options = {"columns": [], "shuffle": 0, "normalize": (0.5, 0.5), "drop_last": True}
    expected = [
        [hashlib.md5(image.tobytes()).hexdigest() for image in batch["image"]]
        for epoch in range(3)
        for batch in ddf.images.iter_batches(16, epoch=epoch, **options)
    ]
    assert len(expected) == 9
    assert steps == expected
