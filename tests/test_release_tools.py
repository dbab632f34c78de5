"""The tools of set-up and release: what they tell of pip, and that they find what is wrong."""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]

METADATA = """Metadata-Version: 2.4
Name: dask-image-ingest
Version: 1.0
License-Expression: Apache-2.0

{readme}
"""


def tool(name: str, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop(name, None)
    return __import__(name)


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("", "starting"),
        ("Collecting dask>=2026.7.1 (from x)\n", "looking for dask>=2026.7.1"),
        (
            "Collecting dali\n  Downloading https://host/nvidia_dali-2.4-py3-none.whl (290.1 MB)\n",
            "fetching nvidia_dali (290.1 MB)",
        ),
        ("  Using cached numpy-2.3.whl (16 MB)\n", "fetching numpy (16 MB)"),
        ("Installing collected packages: a, b, c\n", "installing 3 packages"),
    ],
)
def test_the_line_of_progress_tells_what_pip_is_doing(log, step, monkeypatch):
    assert tool("install", monkeypatch).step_of(log) == step


def test_a_failed_set_up_shows_what_pip_said(tmp_path, monkeypatch, capsys):
    install = tool("install", monkeypatch)
    monkeypatch.setattr(install, "ENVIRONMENT", tmp_path)
    assert install.main("cpu", ["--no-such-option"]) != 0
    printed = capsys.readouterr().out
    assert "no such option: --no-such-option" in printed
    assert str(tmp_path / "pip.log") in printed
    assert [path.name for path in tmp_path.iterdir()] == ["pip.log"]


def distributions(folder: Path, readme: str, licence: str) -> tuple[Path, Path]:
    """A wheel and a source distribution with no more than their metadata and the licence."""
    wheel, sdist = folder / "dask_image_ingest-1.0.whl", folder / "dask_image_ingest-1.0.tar.gz"
    text = METADATA.format(readme=readme)
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("x.dist-info/METADATA", text)
        opened.writestr("x.dist-info/licenses/LICENSE", licence)
        opened.writestr("dask_image_ingest/py.typed", "")
    with tarfile.open(sdist, "w:gz") as opened:
        info = tarfile.TarInfo("dask_image_ingest-1.0/PKG-INFO")
        info.size = len(text.encode())
        opened.addfile(info, io.BytesIO(text.encode()))
    return wheel, sdist


def test_metadata_without_the_licence_or_the_readme_fail_the_release(tmp_path, monkeypatch, capsys):
    check = tool("release_check", monkeypatch)
    readme, licence = ((ROOT / name).read_text() for name in ("README.md", "LICENSE"))
    for given, failures in (((readme, licence), 0), (("", licence), 1), (("", "MIT"), 2)):
        report = check.Report()
        check.check_metadata(*distributions(tmp_path, *given), report)
        assert report.failures == failures, capsys.readouterr().out


def test_two_builds_that_differ_fail_the_release(tmp_path, monkeypatch):
    check = tool("release_check", monkeypatch)
    for name, data in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.whl").write_bytes(data)
    shutil.copytree(tmp_path / "one", tmp_path / "more")
    (tmp_path / "more" / "b.whl").touch()
    for name, failures in (("same", 0), ("other", 1), ("more", 1)):
        report = check.Report()
        check.check_builds(tmp_path / "one", tmp_path / name, report)
        assert report.failures == failures, name


def test_links_of_the_pages_pass_the_check_of_a_release(monkeypatch):
    check = tool("release_check", monkeypatch)
    report = check.Report()
    check.check_links(report)
    assert report.failures == 0
