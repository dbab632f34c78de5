"""Check the files that a release publishes: `make release-check`.

1. The wheel and the source distribution are built twice, from two copies of the tracked files, and
   are equal byte for byte.
2. Their metadata are valid, and they hold the licence and all that the README names.
3. Each link of the README and of the guide leads to a file, or is a well-formed address.
4. For each Python that is found, the wheel is installed into an empty environment, without an extra
   and with `cpu`; there pip finds no conflict, and the command line shows a gallery page.

It prints what it has checked and what it could not, and ends with status 1 if a check failed.

    python tools/release_check.py [--python PATH ...] [--out dist]
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import argparse
import filecmp
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]

# Those that a release is to run on, if they are here.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

# One that has no damaged image, for which a gallery would end with a status of its own.
SHARD = "demo-data/photos-000000.tar"

# What a failed command has said is cut to so many characters.
_LONGEST = 3000


class Report:
    """The results, printed as they come."""

    def __init__(self) -> None:
        self.failures = 0

    def passed(self, text: str) -> None:
        """Tell of a check that passed."""
        print(f"ok      {text}", flush=True)

    def failed(self, text: str) -> None:
        """Tell of one that failed."""
        self.failures += 1
        print(f"FAILED  {text}", flush=True)

    def left(self, text: str) -> None:
        """Tell of one that could not be made here."""
        print(f"not     {text}", flush=True)


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Output of a command, in an environment without this one's Python settings.

    Raises
    ------
    RuntimeError
        If it fails, with what it said.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept | variables, capture_output=True, text=True
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-_LONGEST:]
        raise RuntimeError(f"{' '.join(map(str, command))} fails:\n{said}")
    return done.stdout


# --- the files ------------------------------------------------------------------------------------


def build(folder: Path, name: str, time: str) -> Path:
    """Wheel and source distribution of a copy of the tracked files; the folder that has them."""
    copy, dist = folder / name, folder / f"dist-{name}"
    for file in run("git", "ls-files", "-z", cwd=ROOT).strip("\0").split("\0"):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy / file)
    run(sys.executable, "-m", "build", "--outdir", dist, copy, cwd=folder, SOURCE_DATE_EPOCH=time)
    return dist


def check_builds(one: Path, other: Path, report: Report) -> None:
    """Compare two folders of distributions."""
    names = sorted(path.name for path in one.iterdir())
    if names != sorted(path.name for path in other.iterdir()):
        report.failed("the two builds have files of other names")
        return
    for name in names:
        same = filecmp.cmp(one / name, other / name, shallow=False)
        size = (one / name).stat().st_size
        tell = report.passed if same else report.failed
        tell(f"{name} ({size / 1e6:.1f} MB): two builds are {'equal' if same else 'NOT equal'}")


def check_metadata(wheel: Path, sdist: Path, report: Report) -> None:
    """Metadata are valid and the same in both files, and the wheel has the licence."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (name,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        raw = opened.read(name)
        licences = [each for each in names if "/licenses/" in each]
        texts = {opened.read(each) for each in licences}
    with tarfile.open(sdist) as opened:
        inner = opened.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert inner is not None
        in_sdist = inner.read()
    metadata = Metadata.from_email(raw, validate=True)
    report.passed(
        f"metadata {metadata.metadata_version} are valid: {metadata.name} {metadata.version}"
    )
    if in_sdist == raw:
        report.passed("the metadata of wheel and source distribution are the same")
    else:
        report.failed("the metadata of wheel and source distribution differ")
    if texts == {(ROOT / "LICENSE").read_bytes()} and metadata.license_expression:
        report.passed(f"the licence is in the wheel: {metadata.license_expression}")
    else:
        report.failed(f"the wheel has the licences {licences} and {metadata.license_expression}")
    if "dask_image_ingest/py.typed" not in names:
        report.failed("the wheel has no py.typed")
    if not metadata.project_urls:
        report.left(
            "said where the project is: pyproject.toml has no [project.urls], and the relative "
            "links of the README lead nowhere on a package index"
        )
    if (metadata.description or "").strip() != (ROOT / "README.md").read_text().strip():
        report.failed("the description is not the README")


def check_links(report: Report) -> None:
    """Links of the README and the pages to files exist; those to other sites are well-formed."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    local, elsewhere = 0, 0
    for page in pages:
        if "_build" in page.parts:
            continue
        for link in re.findall(r"\]\(([^)\s]+)", page.read_text()):
            target, _, _ = link.partition("#")
            parts = urlsplit(link)
            if parts.scheme:
                elsewhere += 1
                if parts.scheme != "https" or "." not in parts.netloc:
                    report.failed(f"{page.relative_to(ROOT)}: {link} is no address of https")
            else:
                local += 1
                if target and not (page.parent / target).exists():
                    report.failed(f"{page.relative_to(ROOT)}: {link} leads nowhere")
    report.passed(f"{local} links between files lead somewhere")
    report.left(f"asked for: {elsewhere} links to other sites")


# --- the installed package ------------------------------------------------------------------------


def pythons(named: list[str]) -> Iterator[tuple[str, str | None]]:
    """Version and program of each Python to test; None for one that is not here."""
    told = "import platform; print(platform.python_version())"
    for program in named:
        yield run(program, "-c", told, cwd=ROOT).strip(), program
    if named:
        return
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for version in PYTHONS:
        found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        # Each is run: a name on PATH may be a shim of a Python that is not installed.
        yield version, next((str(each) for each in found if each and _has_venv(each)), None)


def _has_venv(program: str | Path) -> bool:
    done = subprocess.run([program, "-c", "import venv, ensurepip"], capture_output=True)
    return done.returncode == 0


def check_installed(wheel: Path, python: str, shards: Path, folder: Path) -> str:
    """Install the wheel and use it, without an extra and with ``cpu``; the sizes, as a text."""
    run(python, "-m", "venv", folder, cwd=shards)
    programs = folder / "bin"
    command = programs / "dask-image-ingest"
    pip = (programs / "python", "-m", "pip", "--disable-pip-version-check")
    empty = _megabytes(folder)
    sizes = []
    for extra in ("", "[cpu]"):
        run(*pip, "install", "--no-compile", f"{wheel}{extra}", cwd=shards)
        run(*pip, "check", cwd=shards)
        sizes.append(f"{_megabytes(folder) - empty} MB {extra or 'without an extra'}")
        page = shards / "page.html"
        run(command, "gallery", SHARD, "-o", page, cwd=shards)
        images = page.read_text().count("<img ")
        if not images:
            raise RuntimeError(f"the gallery page of the wheel{extra} shows no image")
        page.unlink()
    version = run(command, "--version", cwd=shards).split()[-1]
    if version != wheel.name.split("-")[1]:
        raise RuntimeError(f"the command says that it is {version}")
    return f"{images} images on a gallery page; {', '.join(sizes)}"


def _megabytes(folder: Path) -> int:
    sizes = (path.lstat().st_size for path in folder.rglob("*"))
    return sum(sizes) // 10**6


def check_uvx(wheel: Path, shards: Path, report: Report) -> None:
    """Run the command line of the wheel by uvx, if that is here."""
    uvx = shutil.which("uvx") or shutil.which("uvx", path=str(Path(sys.executable).parent))
    if uvx is None:
        report.left("run: uvx, which is not installed")
        return
    page = shards / "uvx.html"
    gallery = ("dask-image-ingest", "gallery", SHARD, "-o", page)
    try:
        run(uvx, "--from", wheel, *gallery, cwd=shards)
        report.passed(
            f"uvx --from {wheel.name}: {page.read_text().count('<img ')} images on a page"
        )
    except (RuntimeError, OSError) as error:
        report.failed(f"uvx: {error}")


def main() -> int:
    """Make all checks; 1 if one failed."""
    parser = argparse.ArgumentParser(description="Check the files that a release publishes.")
    parser.add_argument("--python", action="append", default=[], help="only these Pythons")
    parser.add_argument("--out", type=Path, help="a folder for the checked files")
    options = parser.parse_args()
    report = Report()
    # The time of the last commit: whoever builds this commit gets the same bytes.
    time = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        one, other = (build(folder, name, time) for name in ("one", "other"))
        check_builds(one, other, report)
        (wheel,), (sdist,) = one.glob("*.whl"), one.glob("*.tar.gz")
        check_metadata(wheel, sdist, report)
        check_links(report)
        runpy.run_path(str(ROOT / "examples" / "photos.py"))["write_shards"](folder / "demo-data")
        for version, python in pythons(options.python):
            if python is None:
                report.left(f"tested: Python {version}, which is not here")
                continue
            environment = folder / f"env-{version}"
            try:
                told = check_installed(wheel, python, folder, environment)
                report.passed(f"Python {version}: {told}")
            except (RuntimeError, OSError) as error:
                report.failed(f"Python {version}: {error}")
            shutil.rmtree(environment, ignore_errors=True)
        check_uvx(wheel, folder, report)
        if options.out and not report.failures:
            options.out.mkdir(parents=True, exist_ok=True)
            for file in (wheel, sdist):
                shutil.copy2(file, options.out)
            print(f"SOURCE_DATE_EPOCH={time}; the files are in {options.out}/")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
