"""``describe`` and ``check`` say which share of a collection a hardware decoder takes."""

from __future__ import annotations

import json

import pytest
from corpus import images
from tars import tar

from dask_image_ingest import cli

TAKEN = ("jpeg-444", "jpeg-422", "jpeg-420", "jpeg-440", "jpeg-grey", "jpeg-restart")
OTHERS = {
    "jpeg-progressive": "progressive",
    "jpeg-progressive-grey": "progressive",
    "jpeg-arithmetic": "arithmetic",
    "jpeg-411": "subsampling 4:1:1",
    "jpeg-cmyk": "4 components",
    "png-rgb-8": "png",
}


@pytest.fixture
def folder(tmp_path):
    names = [*TAKEN, *OTHERS]
    members = {f"{name}.jpg": images()[name] for name in names}
    cut = images()["jpeg-444"][:-50]
    (tmp_path / "a.tar").write_bytes(tar(members))
    (tmp_path / "b.tar").write_bytes(tar({"cut.jpg": cut, "text.txt": b"no picture"}))
    return tmp_path


@pytest.mark.parametrize("verb", ["describe", "check"])
def test_the_share_is_told_with_the_reasons_for_the_others(verb, folder, capsys):
    cli.main([verb, str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    expected = {"truncated": 1}
    for why in OTHERS.values():
        expected[why] = expected.get(why, 0) + 1
    assert report["hardware"] == {
        "taken": len(TAKEN),
        "of": len(TAKEN) + len(OTHERS) + 1,
        "others": expected,
    }
    first = report["per_shard"][0]["hardware"]
    assert (first["taken"], first["of"]) == (len(TAKEN), len(TAKEN) + len(OTHERS))


@pytest.mark.parametrize("verb", ["describe", "check"])
def test_people_read_the_share(verb, folder, capsys):
    cli.main([verb, str(folder)])
    told = capsys.readouterr().out
    assert "6 of 13 images (46%) are what hardware JPEG decoders take" in told
    assert "progressive 2" in told


def test_without_images_there_is_no_share(tmp_path, capsys):
    (tmp_path / "a.tar").write_bytes(tar({}))
    assert cli.main(["describe", str(tmp_path)]) == 0
    assert "0 of 0 images are what" in capsys.readouterr().out


def test_describe_names_shards_that_are_damaged(folder, capsys):
    whole = (folder / "a.tar").read_bytes()
    (folder / "b.tar").write_bytes(whole[:-12_000])
    status = cli.main(["describe", str(folder)])
    told = capsys.readouterr().out
    assert status == 1
    assert f"{folder}/b.tar: " in told
