"""Install what `make gpu-api` runs on: the wheels of the ``cuda12`` extra, where there is no GPU.

pip finds the releases that fit together; they are installed without CUDA's mathematical libraries
and compilers, which nothing here imports and which are half of the download. torch comes along if
pip finds its build for a CPU; else the tests that need it are skipped.

    python tools/gpu_wheels.py          # into the environment of this Python
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

EXTRA = "cuda12"
LEFT_OUT = (
    "cublas",
    "cuda-cccl",
    "cuda-nvcc",
    "cufft",
    "curand",
    "cusolver",
    "cusparse",
    "nvfatbin",
)

PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]


def releases(requirements: list[str]) -> list[str]:
    """What pip would install for these, as ``name==version``."""
    report = subprocess.run(
        [*PIP, "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *requirements],
        stdout=subprocess.PIPE,
        check=True,
    )
    packages = [package["metadata"] for package in json.loads(report.stdout)["install"]]
    return sorted(f"{package['name']}=={package['version']}" for package in packages)


def main() -> None:
    """Install them."""
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras[EXTRA], "pytest"]
    torch = [each for each in extras["notebooks"] if each.startswith("torch==")]
    found = releases([*wanted, *torch])
    if not any(each.startswith("torch==") and each.endswith("+cpu") for each in found):
        found = releases(wanted)
    kept = [each for each in found if not any(f"nvidia-{name}-" in each for name in LEFT_OUT)]
    print(*kept, sep="\n")
    subprocess.run([*PIP, "--no-deps", *kept], check=True)


if __name__ == "__main__":
    main()
