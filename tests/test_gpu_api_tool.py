"""The check of names against the GPU libraries: it checks what is there, and says what is not."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "check_gpu_api.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import check_gpu_api

    return check_gpu_api


def source(folder, text):
    path = folder / "source.py"
    path.write_text(text)
    return path


def test_the_project_uses_only_names_that_there_are():
    done = run()
    assert done.returncode == 0, done.stdout
    assert " 0 problems" in done.stdout


def test_libraries_are_checked_one_by_one(tmp_path):
    """What is missing keeps nothing else from being checked, and is named."""
    text = "import nowhere\nfrom nvidia.dali import fn\nfn.no_such_operator()\n"
    done = run(source(tmp_path, text))
    assert done.returncode == 1
    assert "source.py:3 fn.no_such_operator: there is no such name" in done.stdout


def test_calls_that_do_not_fit_a_signature_are_found(tmp_path):
    text = "from nvidia.dali import Pipeline\nPipeline(batch_size=2, batches=3)\n"
    done = run(source(tmp_path, text))
    assert "unexpected keyword argument 'batches'" in done.stdout
    assert done.returncode == 1


def test_overloaded_functions_are_checked_against_each_signature(tmp_path):
    text = (
        "from nvidia.nvimgcodec import CodeStream, Decoder\n"
        "decoder = Decoder(options='')\n"
        "decoder.decode([CodeStream(b'')], images=None, cuda_stream=0)\n"
    )
    assert run(source(tmp_path, text)).returncode == 0
    assert run(source(tmp_path, text.replace("images=", "imges="))).returncode == 1


def test_a_missing_library_is_an_error_where_it_is_required(tmp_path, tool):
    missing = tool.Tables(tool.LIBRARIES, {}, set()).missing
    done = run("--require", source(tmp_path, ""))
    assert done.returncode == bool(missing)
    for library, reason in missing.items():
        assert f"{library}: {reason}" in done.stdout


def test_an_entry_that_matches_nothing_is_an_error(tool, monkeypatch):
    path = "dask_image_ingest/decode/dali.py"
    monkeypatch.setitem(tool.INSTANCES, path, {"misspelt.images": "nvidia.dali.Pipeline"})
    tables = tool.Tables(("nvidia.dali",), {}, set())
    problems, _, _ = tool.check([path], tables)
    assert problems == [f"{path}: INSTANCES has 'misspelt.images', which is nothing there"]


def test_an_entry_for_a_file_that_is_gone_is_an_error(tool, monkeypatch):
    monkeypatch.setitem(tool.INSTANCES, "gone.py", {})
    monkeypatch.setitem(tool.RESULTS, "Nothing.at_all", "nvidia.dali.Pipeline")
    tables = tool.Tables(("nvidia.dali",), tool.RESULTS, set())
    stale = tool.stale_entries(tables)
    assert "INSTANCES names gone.py, which is no file" in stale
    assert "RESULTS has 'Nothing.at_all', which nothing uses" in stale
