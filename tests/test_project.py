"""The files around the package: what they promise each other."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dask_image_ingest"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "_build" not in page.parts
)

IMPORT_WITHOUT_GPU_PACKAGES = """
import importlib, json, sys

BLOCKED = {"nvidia", "cudf", "cupy", "dask_cuda", "dask_cudf", "pylibcudf", "pynvml", "rmm"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
failed = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failed[module] = str(error)
print(json.dumps(failed))
"""


def test_environment_yml_is_exactly_the_cuda12_extra():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]

    assert pip == PROJECT["optional-dependencies"]["cuda12"]
    assert [re.split(r"[<>=]", entry)[0] for entry in conda] == ["python", "pip"]


# Packages that conda-forge calls otherwise.
CONDA_NAMES = {"xxhash": "python-xxhash"}


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_the_package():
    import dask_image_ingest

    text = (ROOT / "conda" / "recipe.yaml").read_text()
    recipe = yaml.safe_load(re.sub(r"\$\{\{ (\w+) \}\}", r"<\1>", text))
    assert recipe["context"]["version"] == dask_image_ingest.__version__
    run = {entry.split()[0]: entry.split()[1] for entry in recipe["requirements"]["run"]}
    assert run.pop("python") == PROJECT["requires-python"]
    needed: dict[str, str] = {}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        needed.setdefault(name, str(requirement.specifier))  # of numpy the lower bound
    assert run == needed
    (hatchling,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert hatchling.replace(">=", " >=") in recipe["requirements"]["host"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert dict([entry.split(" = ")]) == PROJECT["scripts"]


def test_rattler_build_accepts_the_conda_recipe():
    rattler_build = pytest.importorskip("rattler_build", reason="needs py-rattler-build")
    recipe = rattler_build.Stage0Recipe.from_file(str(ROOT / "conda" / "recipe.yaml"))
    (variant,) = recipe.render(rattler_build.VariantConfig())
    rendered = variant.recipe.to_dict()
    assert rendered["build"]["noarch"] == "python"
    assert rendered["package"]["version"] == rendered["context"]["version"]


def test_cuda13_extra_differs_from_cuda12_by_cuda_alone():
    extras = PROJECT["optional-dependencies"]
    as_cuda13 = [
        requirement.replace("cu12", "cu13")
        .replace("cuda12x", "cuda13x")
        .replace("cuda120", "cuda130")
        for requirement in extras["cuda12"]
    ]
    assert extras["cuda13"] == as_cuda13


# Modules for those who have another package.
OPTIONAL = (
    "dask_image_ingest.frames.cudf.",
    "dask_image_ingest.loader.dataloader",
    "dask_image_ingest.loader.torch_worker",
)


def test_every_module_imports_without_dali_and_gpu_packages():
    modules = [module for module in MODULES if not module.startswith(OPTIONAL)]
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_GPU_PACKAGES, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {}


def test_no_backend_imports_an_accessor():
    """An accessor takes itself to whatever backend is loaded."""
    for path in (PACKAGE / "frames").glob("*.py"):
        imported = re.findall(
            r"^\s*(?:from|import) (dask_image_ingest\S*)", path.read_text(), re.MULTILINE
        )
        assert not [m for m in imported if m.startswith("dask_image_ingest.accessor")], path.name


def test_the_package_shows_its_public_names_and_no_others():
    import dask_image_ingest

    assert set(dir(dask_image_ingest)) == {*dask_image_ingest.__all__, "__version__"}
    assert all(hasattr(dask_image_ingest, name) for name in dir(dask_image_ingest))


def test_changelog_tells_of_this_version():
    import dask_image_ingest

    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [heading for heading in headings if heading != "Unreleased"]
    assert releases[0] == dask_image_ingest.__version__


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    path = ROOT / page
    links = re.findall(r"\]\(([^)\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not _leads_somewhere(path, *link.split("#"))] == []


def _leads_somewhere(page: Path, link: str, heading: str = "") -> bool:
    target = page.parent / link if link else page
    return target.exists() and (not heading or heading in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """The names that GitHub and Sphinx give to headings."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    assert [n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()] == []


def test_functions_and_classes_that_contributing_names_are_in_these_files():
    rows = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", rows)
    assert len(named) > 15
    for path, functions in named:
        defined = {
            node.name
            for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert set(re.findall(r"\w+", functions)) <= defined, path


def test_console_script_is_the_command_line():
    from dask_image_ingest.cli import main

    assert pkgutil.resolve_name(PROJECT["scripts"]["dask-image-ingest"]) is main


def test_mypy_makes_exceptions_for_packages_that_are_used():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    used = {
        name
        for folder in (PACKAGE, ROOT / "examples")
        for path in folder.rglob("*.py")
        for name in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    }
    packages = {name.split(".")[0] for each in overrides for name in each["module"]}
    assert packages - used == set()


def test_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_no_file_names_a_path_of_somebodys_machine():
    private = re.compile(r"(?<![\w.{}~/$])/(?:work|home|root|Users)/")
    named = {
        path.relative_to(ROOT).as_posix(): private.findall(path.read_text())
        for folder in (PACKAGE, ROOT / "examples", ROOT / "docs")
        for pattern in ("*.py", "*.md")
        for path in folder.rglob(pattern)
    }
    assert {path for path, found in named.items() if found} == set()


@pytest.mark.slow
def test_processes_of_a_nightly_run_draw_the_same_seed():
    # Else they collect different tests, which pytest-xdist refuses to run.
    pytest_ = [sys.executable, "-m", "pytest", "--nightly", "-n", "2", "tests/export/test_keys.py"]
    finished = subprocess.run(pytest_, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout


def test_docstrings_begin_with_a_noun_or_an_imperative():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0] in {"What", "Which", "Whether", "How", "Where", "When", "Who"}
    ]
    assert found == []
