"""The GPU benchmark runs from a checkout, on a machine where the package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]

UNINSTALLED = """
import json, runpy, sys
from pathlib import Path

here = sys.argv.pop(1)
sys.path[:] = [p for p in sys.path if p and not (Path(p) / "dask_image_ingest").exists()]
sys.path.insert(0, here)
runpy.run_path(here + "/gpu.py", run_name="imported")
import dask_image_ingest, os
print(json.dumps([dask_image_ingest.__file__, os.environ["PYTHONPATH"]]))
"""


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT / "docs",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_beside_it_is_found_uninstalled():
    found, path = json.loads(run("-c", UNINSTALLED, ROOT / "benchmarks").splitlines()[-1])
    assert Path(found) == ROOT / "dask_image_ingest" / "__init__.py"
    assert path.split(os.pathsep)[:2] == [str(ROOT), str(ROOT / "benchmarks")]


def test_its_help_says_what_each_figure_is():
    text = run(ROOT / "benchmarks" / "gpu.py", "--help")
    for figure in "ansbicde":
        assert f"\n{figure}    " in text
    assert "not run on a GPU yet" in text


def test_without_a_gpu_it_says_so_and_tries_the_rest():
    text = run(
        ROOT / "benchmarks" / "gpu.py", "--cpu-parts", "--only", "0.2 MP", CUDA_VISIBLE_DEVICES=""
    )
    assert "nothing measured" in text
    assert "| 0.2 MP |" in text


def test_partitions_have_more_images_than_the_batches_that_begin_and_end_them(monkeypatch):
    """Else nothing of a partition is decoded while another part of it is prepared."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from _gpu_images import KINDS

    for kind in KINDS:
        assert kind.per_shard >= (256 if kind.name == "12 MP" else 2000)


def test_reads_with_an_index_are_the_same_images(monkeypatch, tmp_path):
    """What the figures b and i have in common, as far as a CPU can have it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from _gpu_images import KINDS, make_images, write_shards

    import dask_image_ingest as dii

    kind = KINDS[0]._replace(shards=2, per_shard=3, distinct=2)
    paths = write_shards(kind, make_images(kind), tmp_path)
    dii.write_index(paths)
    counts = [
        sum(a is not None for a in frame.images.arrays())
        for index in (False, True)
        for frame in [dii.read_webdataset_images(paths, backend="pandas", index=index).compute()]
    ]
    assert counts == [6, 6]
