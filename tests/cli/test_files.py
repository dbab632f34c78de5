"""The verbs take image files and parquet files as they take shards."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from synthetic import encode, photograph, write_shard
from witnesses import by_webdataset, shards_in

from dask_image_ingest import cli

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of Dask


@pytest.fixture(scope="module")
def pictures():
    """Key → file of six photographs, of which one is cut short."""
    files = {f"{n}": encode(photograph(30 + n, 40, n)) for n in range(6)}
    return files | {"5": files["5"][:-9]}


@pytest.fixture
def folder(pictures, tmp_path):
    (tmp_path / "photos").mkdir()
    for key, data in pictures.items():
        (tmp_path / "photos" / f"{key}.jpg").write_bytes(data)
    return tmp_path / "photos"


@pytest.fixture
def parquet(pictures, tmp_path):
    table = pa.table(
        {
            "__key__": list(pictures),
            "image": [{"bytes": data, "path": key} for key, data in pictures.items()],
            "score": list(range(6)),
        }
    )
    pq.write_table(table, tmp_path / "photos.parquet")
    return tmp_path / "photos.parquet"


@pytest.fixture(params=["folder", "glob", "parquet", "folder of parquet"])
def paths(request, tmp_path):
    kind = "folder" if request.param in ("folder", "glob") else "parquet"
    made = request.getfixturevalue(kind)
    if request.param == "glob":
        return [str(path) for path in made.glob("*.jpg")]
    if request.param == "folder of parquet":
        (tmp_path / "tables").mkdir()
        return [str(made.rename(tmp_path / "tables" / "0.parquet").parent)]
    return [str(made)]


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_describe_and_check_count_them(paths, pictures, capsys):
    status, out, _ = run(capsys, "describe", *paths, "--json")
    summary = json.loads(out)
    assert (summary["samples"], summary["formats"]) == (6, {"jpeg": 6})
    assert summary["bytes"] == sum(map(len, pictures.values()))
    assert summary["sizes"]["largest"] == [40, 35]
    assert (status, "errors" in summary) == (0, False)
    status, out, _ = run(capsys, "describe", *paths, "--decode")
    assert status == 1
    assert "bad      errors: truncated 1" in out
    status, out, _ = run(capsys, "check", *paths, "--json")
    assert status == 1
    assert json.loads(out)["bad_images"]["truncated"]["first"] == ["5"]


def test_head_and_gallery_show_them(paths, tmp_path, capsys):
    _, out, _ = run(capsys, "head", *paths, "-n", 2, "--json")
    assert [(row["__key__"], row["height"]) for row in json.loads(out)] == [("0", 30), ("1", 31)]
    _, out, _ = run(capsys, "gallery", *paths, "-o", tmp_path / "page.html")
    assert out == f"{tmp_path}/page.html: 6 images\n"


def test_export_packs_those_that_a_condition_keeps(paths, pictures, tmp_path, capsys):
    template = tmp_path / "out" / "{shard}.tar"
    where = ["--where", "height >= 32 and height < 35"]
    status, out, _ = run(capsys, "export", *paths, "-o", template, *where)
    assert status == 0, out
    found = dict(by_webdataset(shards_in(tmp_path / "out")))
    assert found == {key: {"jpg": pictures[key]} for key in "234"}


def test_columns_of_parquet_files_are_asked(parquet, pictures, tmp_path, capsys):
    template = tmp_path / "out" / "{shard}.tar"
    run(capsys, "export", parquet, "-o", template, "--where", "score in [0, 4]")
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == {
        key: {"jpg": pictures[key]} for key in "04"
    }


def test_what_leads_to_nothing_is_told_as_that_of_shards(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    status, _, err = run(capsys, "describe", tmp_path / "empty")
    assert status == 2
    assert "leads to no shard" in err


def test_a_gallery_draws_masks_over_the_images(tmp_path, capsys):
    mask = Image.new("L", (40, 30), 1)
    members = {"0.jpg": encode(photograph(30, 40)), "0.seg.png": encode(mask, "png")}
    write_shard(tmp_path / "a.tar", members)
    pages = []
    for number, options in enumerate([[], ["--mask", "seg.png"]]):
        page = tmp_path / f"{number}.html"
        status, _, err = run(capsys, "gallery", tmp_path / "a.tar", "-o", page, *options)
        assert (status, err) == (0, "")
        pages.append(page.read_text())
    assert pages[0] != pages[1]
    assert pages[1].count("data:image/jpeg") == pages[0].count("data:image/jpeg") == 1
