"""``quality`` and ``duplicates`` on the command line."""

from __future__ import annotations

import json

import pytest
from few_images import encoded, write_bad_shard
from PIL import Image
from tars import tar

from dask_image_ingest import cli


@pytest.fixture
def copies(photos, tmp_path):
    """Two photographs, one of them three times: twice the same bytes, once smaller."""
    one, other = (photo for photo in photos[1:11:5])
    small = Image.fromarray(one.pixels)
    small = small.resize((small.width - 8, small.height - 8))
    file = tmp_path / "small.png"
    small.save(file)
    members = {"a.jpg": one.encoded, "b.jpg": one.encoded, "c.jpg": other.encoded}
    shard = tmp_path / "copies.tar"
    shard.write_bytes(tar({**members, "d.png": file.read_bytes()}))
    return str(shard)


def test_duplicates_names_each_and_the_one_that_stays(copies, capsys):
    assert cli.main(["duplicates", copies, "--by", "bytes"]) == 1
    out = capsys.readouterr().out
    assert out == "4 samples, 1 duplicate\n  b of copies.tar: equal to a of copies.tar\n"
    assert cli.main(["duplicates", copies, "--by", "bytes", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    url = told["groups"][0]["keep"]["__url__"]
    assert url.endswith("/copies.tar")
    assert told == {
        "samples": 4,
        "duplicates": 1,
        "groups": [
            {
                "keep": {"__key__": "a", "__url__": url},
                "duplicates": [{"__key__": "b", "__url__": url, "distance": 0}],
            }
        ],
    }


def test_near_duplicates_have_their_distance(copies, capsys):
    assert cli.main(["duplicates", copies, "--distance", "31", "--json"]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    found = {row["__key__"]: row["distance"] for row in group["duplicates"]}
    assert group["keep"]["__key__"] == "a"
    assert found["b"] == 0
    assert 0 < found["d"] <= 31


def test_a_collection_without_duplicates_is_fine(shards, capsys):
    paths = [str(shard) for shard in shards]
    assert cli.main(["duplicates", *paths, "--by", "bytes"]) == 0
    assert capsys.readouterr().out == "24 samples, 0 duplicates\n"


def test_quality_counts_issues_and_names_who_has_them(tmp_path, capsys):
    write_bad_shard(tmp_path)
    assert cli.main(["quality", str(tmp_path / "bad.tar"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["unjudged"]) == (3, 2)
    assert [sample["__key__"] for sample in told["issues"]["grayscale"]["samples"]] == ["0"]
    assert told["issues"]["dark"] == {"images": 0, "share": 0.0, "samples": []}
    assert cli.main(["quality", str(tmp_path / "bad.tar")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 samples, 2 without an image that decodes"
    assert "grayscale              1  100.0%  0" in lines


def test_good_pictures_are_fine(photos, tmp_path, capsys):
    shard = tmp_path / "good.tar"
    shard.write_bytes(tar({"a.jpg": photos[1].encoded}))
    assert cli.main(["quality", str(shard)]) == 0
    assert capsys.readouterr().out.startswith("1 sample, 0 without")


@pytest.mark.parametrize(
    "arguments",
    [["--distance", "32"], ["--keep", "prettiest"], ["--by", "bytes", "--variants=mirrored"]],
)
def test_wrong_arguments_end_with_status_2(copies, capsys, arguments):
    assert cli.main(["duplicates", copies, *arguments]) == 2
    assert capsys.readouterr().err.startswith("dask-image-ingest: ")


def test_keys_do_not_steer_the_terminal(tmp_path, capsys):
    picture = encoded((40, 30), "PNG")
    shard = tmp_path / "odd.tar"
    shard.write_bytes(tar({"a\x1b[2J.png": picture, "b\x1b[2J.png": picture}))
    cli.main(["duplicates", str(shard), "--by", "bytes"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "b\\x1b[2J of odd.tar: equal to a\\x1b[2J" in out
