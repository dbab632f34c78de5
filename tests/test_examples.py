"""The examples run, and show what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]


def test_demo_shows_a_damaged_image_and_writes_its_contact_sheet(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    assert "51 images of 29 sizes" in finished.stdout
    assert "truncated: " in finished.stdout
    with Image.open(tmp_path / "demo-data" / "demo.png") as sheet:
        assert sheet.size == (13 * 128, 4 * 128)


def test_the_segmentation_example_learns_and_shows_masks(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "06_segment.py", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    shares = [float(line.split()[2].rstrip("%")) for line in finished.stdout.splitlines()]
    assert shares[-1] > 90
    assert shares[-1] > shares[0]
    assert (tmp_path / "masks.html").read_text().count("<img") == 12


def test_the_caption_example_finds_captions_and_wrong_ones(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "07_captions.py", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    wrong, found = finished.stdout.splitlines()
    assert "wrong captions" in wrong
    assert int(wrong.split("%")[0]) >= 80  # 10 by chance
    assert "find their caption among" in found
    assert int(found.split("%")[0]) >= 80  # 2 by chance


def test_the_export_example_reads_back_what_it_wrote(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / "04_export.py", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    assert "24 of 52 samples" in finished.stdout
    assert "'txt': 'the retina of a human eye'" in finished.stdout
    assert "dark ones, decoded again: (6, 64, 64, 3)" in finished.stdout
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
