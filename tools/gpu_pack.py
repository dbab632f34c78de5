"""Check packages for a rented machine with a GPU against its own Python and CUDA, before they go.

    python3 tools/gpu_pack.py describe > image.json       # there: needs nothing but Python
    python tools/gpu_pack.py check image.json WHEELS       # here: a folder of wheels

A machine without a network has to be brought what this package needs of RAPIDS and DALI. The check
names each wheel that does not fit the machine (another Python, another CUDA, a newer glibc), and
each requirement of a wheel or of this package that neither a wheel nor the machine's own packages
meet. It has to be made before wheels are packed into parts: each minute there is paid for.
Where the machine can't be asked before, write ``image.json`` by hand, from what is known of it:
``{"python": "3.12", "cuda": 13, "glibc": "2.39", "packages": {"cupy-cuda13x": "14.2.0"}}``, with
null for a version that is not known, which then meets all.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

# The end of a package's name by which CUDA's major version is known: -cu13, -cuda130, -cuda13x.
_CUDA = re.compile(r"-cu(?:da)?(\d\d)(?:\d|x)?$")

# Parts of the GPU libraries that this package never loads.
LEFT_OUT = ("rapids-dask-dependency", "bokeh", "numba-cuda-mlir")


def describe() -> dict[str, Any]:
    """Python, CUDA, glibc and packages of this machine."""
    packages = {
        each.metadata["Name"].lower().replace("_", "-"): each.version
        for each in importlib.metadata.distributions()
    }
    of_packages = [int(found[1]) for name in packages if (found := _CUDA.search(name))]
    return {
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        # What is installed decides; the driver runs that and older ones.
        "cuda": max(of_packages, default=_cuda_of_driver()),
        "cuda_of_driver": _cuda_of_driver(),
        "packages": packages,
    }


def _cuda_of_driver() -> int | None:
    """CUDA's major version that the driver has; None without one."""
    import ctypes

    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000 or None


def check(image: dict[str, Any], wheels: Iterable[Path]) -> list[str]:
    """What does not fit, or is missing."""
    # Not at the top: the machine that `describe` runs on may lack it.
    from packaging.utils import canonicalize_name, parse_wheel_filename

    tags, problems = set(_tags(image)), []
    carried: dict[str, Message] = {}
    for path in sorted(wheels):
        name, _, _, of_wheel = parse_wheel_filename(path.name)
        if name in carried:
            problems.append(f"{path.name}: there is another wheel of it")
        if not of_wheel & tags:
            problems.append(
                f"{path.name}: does not fit Python {image['python']} with glibc {image['glibc']}"
            )
        cuda = _CUDA.search(name)
        if cuda and int(cuda[1]) != image["cuda"]:
            problems.append(f"{path.name}: is for CUDA {cuda[1]}, there is CUDA {image['cuda']}")
        carried[name] = _metadata(path)
    there = {canonicalize_name(name): version for name, version in image["packages"].items()}
    there |= {name: metadata["Version"] for name, metadata in carried.items()}
    needed = list(_requirements(image, carried))
    # Extras that are asked for, as of nvidia-nvimgcodec-cu13[all], bring needs of their own.
    extras: dict[str, set[str]] = {}
    has_grown = True
    while has_grown:
        has_grown = False
        for owner, need in needed:
            if _is_needed(need, image, extras.get(owner, set())):
                asked = extras.setdefault(canonicalize_name(need.name), set())
                has_grown |= not need.extras <= asked
                asked |= need.extras
    for owner, need in needed:
        is_needed = _is_needed(need, image, extras.get(owner, set()))
        if is_needed and (problem := _unmet(need, there)):
            problems.append(f"{owner} needs {problem}")
    return problems


def _requirements(image: dict[str, Any], carried: dict[str, Message]) -> Iterator[tuple[str, Any]]:
    """Who needs what: this package with its extra for the machine's CUDA, and each wheel."""
    from packaging.requirements import Requirement

    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    extra = f"cuda{image['cuda']}"
    if extra not in extras:
        sys.exit(f"the machine has CUDA {image['cuda']}, and this package needs 12 or 13")
    pytest_ = [text for text in extras["test"] if re.match(r"pytest\b(?!-)", text)]
    for text in [*project["dependencies"], *extras[extra], *pytest_]:
        yield "this package", Requirement(text)
    for name, metadata in carried.items():
        for text in metadata.get_all("Requires-Dist") or []:
            yield name, Requirement(text)


def _is_needed(need: Any, image: dict[str, Any], extras: set[str]) -> bool:
    """True if a requirement is one on this machine, with these extras of who has it."""
    environment = {
        "python_version": ".".join(image["python"].split(".")[:2]),
        "python_full_version": image["python"],
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    return need.name not in LEFT_OUT and (
        need.marker is None
        or any(need.marker.evaluate(environment | {"extra": extra}) for extra in {"", *extras})
    )


def _unmet(need: Any, there: dict[str, str | None]) -> str | None:
    """A requirement that is not met, and by what; None if it is."""
    from packaging.utils import canonicalize_name

    name = canonicalize_name(need.name)
    if name not in there:
        return f"{need}, which is not there"
    version = there[name]
    if version is not None and not need.specifier.contains(version, prereleases=True):
        return f"{need}, and {version} is there"
    return None


def _tags(image: dict[str, Any]) -> Iterator[Any]:
    """Tags of the wheels that the machine can use."""
    from packaging.tags import compatible_tags, cpython_tags

    python = tuple(map(int, image["python"].split(".")[:2]))
    newest = int(image["glibc"].split(".")[1])
    platforms = [f"manylinux_2_{number}_x86_64" for number in range(newest, 4, -1)]
    platforms += [f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    platforms += ["linux_x86_64"]
    interpreter = f"cp{python[0]}{python[1]}"
    yield from cpython_tags(python, [interpreter], platforms)
    yield from compatible_tags(python, interpreter, platforms)


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (
            each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each)
        )
        return BytesParser().parsebytes(archive.read(name))


def main() -> int:
    """Do what the arguments ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("describe", help="print what this machine is, as JSON")
    checking = commands.add_parser("check", help="say what does not fit it; 1 if anything does not")
    checking.add_argument("image", type=Path, help="what `describe` printed")
    checking.add_argument("wheels", type=Path, help="a folder of wheels")
    arguments = parser.parse_args()
    if arguments.command == "describe":
        print(json.dumps(describe(), indent=1))
        return 0
    image = json.loads(arguments.image.read_text())
    wheels = list(arguments.wheels.glob("*.whl"))
    problems = check(image, wheels)
    print("\n".join(problems), end="\n" if problems else "")
    print(
        f"{len(wheels)} wheels beside Python {image['python']}, CUDA {image['cuda']} and "
        f"{len(image['packages'])} packages of the machine: {len(problems)} problems"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
