"""Wheels for a machine with a GPU: what does not fit it is named before it is rented."""

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.packaging

TOOL = Path(__file__).parents[1] / "tools" / "gpu_pack.py"

# What this package and its extras need, for each CUDA that they are for.
BASE = {
    "braceexpand": "0.1.7",
    "cykooz-resizer": "4.0.1",
    "dask": "2026.7.1",
    "dask-cuda": "26.10.0",
    "distributed": "2026.7.1",
    "fsspec": "2026.1.0",
    "numpy": "2.4.6",
    "pandas": "3.0.6",
    "pillow": "13.0.0",
    "psutil": "7.0.0",
    "pyarrow": "23.0.0",
    "pytest": "9.0.0",
    "urllib3": "2.5.0",
    "xxhash": "3.6.0",
}
RAPIDS = {"cudf-cu{}": "26.10.2", "dask-cudf-cu{}": "26.10.2", "nvidia-dali-cuda{}0": "2.4.0"}


def image(python, cuda, without=()):
    """A machine that has all but what is brought."""
    packages = BASE | {f"cupy-cuda{cuda}x": "14.2.0"}
    return {
        "python": python,
        "cuda": cuda,
        "glibc": "2.39",
        "packages": {name: found for name, found in packages.items() if name not in without},
    }


def wheel(folder, name, version, tag="py3-none-any", requires=()):
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    stem = f"{name.replace('-', '_')}-{version}"
    with ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)


def bring(folder, cuda):
    for name, version in RAPIDS.items():
        wheel(folder, name.format(cuda), version)


def check(folder, machine):
    (folder / "image.json").write_text(json.dumps(machine))
    done = subprocess.run(
        [sys.executable, TOOL, "check", folder / "image.json", folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr
    *problems, total = done.stdout.splitlines()
    assert total.endswith(f"{len(problems)} problems")
    assert done.returncode == bool(problems)
    return problems


MACHINES = [("3.11.7", 12), ("3.12.3", 13)]


@pytest.mark.parametrize(("python", "cuda"), MACHINES)
def test_what_fits_a_machine_has_no_problems(tmp_path, python, cuda):
    bring(tmp_path, cuda)
    short = "cp" + "".join(python.split(".")[:2])
    wheel(tmp_path, "own", "1.0", f"{short}-{short}-manylinux_2_28_x86_64")
    wheel(tmp_path, "stable", "1.0", "cp39-abi3-manylinux2014_x86_64", ["own>=1", "numpy<2.5"])
    wheel(tmp_path, "windows", "1.0", requires=["absent; sys_platform == 'win32'"])
    assert check(tmp_path, image(python, cuda)) == []


@pytest.mark.parametrize(("python", "cuda"), MACHINES)
def test_what_is_for_another_machine_is_named(tmp_path, python, cuda):
    other = {"3.11.7": "cp312", "3.12.3": "cp311"}[python]
    bring(tmp_path, cuda)
    wheel(tmp_path, "python", "1.0", f"{other}-{other}-manylinux_2_28_x86_64")
    wheel(tmp_path, "glibc", "1.0", "py3-none-manylinux_2_40_x86_64")
    wheel(tmp_path, "arm", "1.0", "py3-none-manylinux_2_28_aarch64")
    wheel(tmp_path, f"rmm-cu{25 - cuda}", "26.10.0")
    found = check(tmp_path, image(python, cuda))
    assert [problem.partition("-")[0] for problem in found] == [
        "arm",
        "glibc",
        "python",
        f"rmm_cu{25 - cuda}",
    ]


def test_what_nobody_brings_is_named_with_who_needs_it(tmp_path):
    bring(tmp_path, 13)
    wheel(tmp_path, "llvm-user", "1.0", requires=["llvmlite<0.47", "numpy<2.4", "pandas"])
    assert check(tmp_path, image("3.12.3", 13, {"xxhash", "braceexpand"})) == [
        "this package needs braceexpand>=0.1.7, which is not there",
        "this package needs xxhash>=3.5, which is not there",
        "llvm-user needs llvmlite<0.47, which is not there",
        "llvm-user needs numpy<2.4, and 2.4.6 is there",
    ]


def test_extras_that_are_asked_for_have_needs_of_their_own(tmp_path):
    bring(tmp_path, 13)
    wheel(tmp_path, "user", "1.0", requires=["codec[all]", "codec[other]; extra == 'never'"])
    needs = ["jpeg; extra == 'all'", "tiff; extra == 'other'", "xxhash[fast]>3"]
    wheel(tmp_path, "codec", "1.0", requires=needs)
    machine = image("3.12.3", 13)
    machine["packages"]["xxhash"] = None  # in a release that is not known
    assert check(tmp_path, machine) == [
        'codec needs jpeg; extra == "all", which is not there',
    ]


def test_wheels_for_the_other_cuda_do_not_stand_for_those_that_are_needed(tmp_path):
    bring(tmp_path, 12)
    found = check(tmp_path, image("3.12.3", 13))
    assert sum("is for CUDA 12, there is CUDA 13" in problem for problem in found) == 3
    assert "this package needs cudf-cu13==26.10.*, which is not there" in found


def test_a_machine_describes_itself_as_the_check_wants_it(tmp_path):
    """In a Python that has nothing: only its own modules are imported."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", TOOL, "describe"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    described = json.loads(done.stdout)
    assert described["python"] == ".".join(map(str, sys.version_info[:3]))
    assert image("3.12.3", 13).keys() <= described.keys()
