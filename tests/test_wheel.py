"""What is published: the wheel and the source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]  # pip writes a gigabyte: DALI

ROOT = Path(__file__).parents[1]

READ_SHARDS = """
import sys
import dask_image_ingest as dii

ddf = dii.read_webdataset_images(sys.argv[1:], size=32)
frame = ddf.compute(scheduler="synchronous")
print(dii.__file__)
print(len(frame), {image.shape for image in frame.images.arrays()})
"""


def run(*command: object, cwd: Path) -> str:
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    finished = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    written = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dask_image_ingest").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == written
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_can_be_tested(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("docs/**/*.md")]
    paths = {path.relative_to(ROOT).as_posix() for path in wanted}
    assert {path for path in paths if not path.startswith("docs/_build/")} <= names
    assert {"Makefile", ".ci/run", "pyproject.toml", "tools/oldest.py", "README.md"} <= names


def test_the_wheel_reads_shards_in_an_empty_environment(dist, tmp_path, shards):
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    run(*install, f"{wheel}[cpu]", cwd=tmp_path)

    imported, read = run(python, "-c", READ_SHARDS, *shards, cwd=tmp_path).splitlines()
    assert Path(imported).is_relative_to(tmp_path / "env")
    assert read == "24 {(32, 32, 3)}"
    command = tmp_path / "env" / "bin" / "dask-image-ingest"
    assert run(command, "describe", *shards, cwd=tmp_path).startswith("24 samples in 3 shards")
