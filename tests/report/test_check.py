"""`dask-image-ingest check`: what is bad is found, counted, named and told by the exit status."""

from __future__ import annotations

import io
import json
import re
import tarfile

import pytest
from PIL import Image
from tars import add, tar

from dask_image_ingest import cli


@pytest.fixture(scope="module")
def folder(photos, tmp_path_factory):
    """One sound shard, and one for each kind of trouble."""
    folder = tmp_path_factory.mktemp("check")
    good = [(f"{n}.{p.extension}", p.encoded) for n, p in enumerate(photos[:3])]
    jpeg = photos[0].encoded
    (folder / "sound.tar").write_bytes(tar(good))
    bad = [
        *good,
        *((f"html{n}.jpg", b"<html>404</html>") for n in range(5)),
        ("cut.jpg", jpeg[:-99]),
    ]
    bad += [("text.txt", b"no picture")]
    (folder / "bad-images.tar").write_bytes(tar(bad))
    (folder / "cut.tar").write_bytes(tar(good)[:-30_000])
    (folder / "no-tar.tar").write_bytes(b"<html>" * 500)
    doubles = [good[0], good[0], good[1], ("2.txt", b""), good[2], good[1], ("2.cls", b"1")]
    (folder / "doubles.tar").write_bytes(tar(doubles))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "0.jpg", jpeg, pax_headers={"comment": "é"})
    (folder / "pax.tar").write_bytes(out.getvalue())
    return folder


def run(capsys, *arguments):
    status = cli.main(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_sound_shard_is_fine(folder, photos, capsys):
    status, out, err = run(capsys, folder / "sound.tar", "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert (report["shards"], report["bad_shards"], report["samples"]) == (1, 0, 3)
    assert report["bytes"] == sum(len(photo.encoded) for photo in photos[:3])
    assert report["bad_images"] == {}
    assert run(capsys, folder / "sound.tar")[0] == 0


def test_bad_images_are_counted_by_reason_with_the_first_keys(folder, capsys):
    status, out, _ = run(capsys, folder / "bad-images.tar", "--json")
    bad = json.loads(out)["bad_images"]
    assert status == 1
    assert {code: entry["count"] for code, entry in bad.items()} == {
        "not-an-image": 5,
        "truncated": 1,
        "missing": 1,
    }
    assert bad["not-an-image"]["first"] == ["html0", "html1", "html2"]
    assert "HTML" in bad["not-an-image"]["detail"]


def test_damage_names_code_and_byte(folder, capsys):
    status, out, _ = run(capsys, folder / "cut.tar", "--json")
    (shard,) = json.loads(out)["per_shard"]
    assert status == 1
    assert shard["damage"].startswith("truncated-member: the shard ends ")
    assert shard["samples"] == 2


def test_an_unreadable_shard_does_not_hide_the_others(folder, capsys):
    status, out, _ = run(capsys, folder / "no-tar.tar", folder / "sound.tar", "--json")
    report = json.loads(out)
    assert status == 1
    assert report["unreadable"] == [str(folder / "no-tar.tar")]
    assert report["samples"] == 3


def test_duplicates_repeated_and_interleaved_keys_are_told_apart(folder, capsys):
    status, out, _ = run(capsys, folder / "doubles.tar", "--json")
    (shard,) = json.loads(out)["per_shard"]
    assert status == 1
    assert (shard["duplicates"], shard["repeated"], shard["interleaved"]) == (["0"], ["1"], ["2"])


def test_describe_tells_of_keys_that_occur_twice(folder, capsys):
    assert cli.main(["describe", str(folder / "doubles.tar")]) == 1
    out = capsys.readouterr().out
    assert "1 key with a member twice; 1 key in more than one sample" in out


def test_pax_headers_are_told_and_no_fault(folder, capsys):
    status, out, _ = run(capsys, folder / "pax.tar", "--json")
    assert status == 0
    assert json.loads(out)["pax"] == 1


@pytest.mark.parametrize("command", ["check", "describe"])
def test_links_and_what_else_is_skipped_are_counted_and_links_are_a_problem(
    photos, tmp_path, capsys, command
):
    good = (f"0.{photos[0].extension}", photos[0].encoded)
    added = [good, ("._0.jpg", b""), (".DS_Store", b""), ("__x__", b""), ("README", b"")]
    (tmp_path / "macos.tar").write_bytes(tar(added))
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        add(archive, *good)
        add(archive, "1.jpg", type=tarfile.LNKTYPE, linkname=good[0])
        add(archive, "2.jpg", type=tarfile.SYMTYPE, linkname=good[0])
        add(archive, "3.jpg", type=tarfile.LNKTYPE, linkname="4.jpg")
    outcomes = {}
    for name in ("macos", "links"):
        status = cli.main([command, str(tmp_path / f"{name}.tar"), "--json"])
        report = json.loads(capsys.readouterr().out)
        outcomes[name] = status, report["samples"], report["skipped"]
        cli.main([command, str(tmp_path / f"{name}.tar")])
        assert "symbolic links, which" in capsys.readouterr().out or name == "macos"
    assert outcomes == {
        "macos": (0, 1, {"macos": 2, "meta": 1, "no-extension": 1}),
        "links": (1, 2, {"symbolic-link": 1, "hard-link": 1}),
    }


@pytest.mark.parametrize("command", ["check", "describe"])
def test_images_of_very_many_extensions_are_counted_where_they_are_not_inspected(
    photos, tmp_path, capsys, command
):
    (tmp_path / "0.tar").write_bytes(tar({f"k{n}.{n}.jpg": photos[0].encoded for n in range(70)}))
    cli.main([command, str(tmp_path / "0.tar"), "--json"])
    assert json.loads(capsys.readouterr().out)["skipped"] == {"many-kinds": 6}


def test_people_read_totals_reasons_and_each_shard_that_is_not_sound(folder, capsys):
    status, out, _ = run(capsys, folder)
    assert status == 1
    assert "6 shards" in out
    assert "4 shards with problems" in out
    assert re.search(r"not-an-image +5 +html0, html1, html2 \.\.\.", out)
    assert "1 key in more than one sample: 1" in out
    assert "sound.tar" not in out


def test_keys_and_reasons_cannot_write_to_the_terminal(tmp_path, capsys):
    hostile = "\x1b[2Jkey\u202e"
    (tmp_path / "s.tar").write_bytes(tar([(f"{hostile}.jpg", b"\x1b[31mred")], "pax"))
    status, out, err = run(capsys, tmp_path / "s.tar")
    assert status == 1
    assert all(character.isprintable() for character in (out + err).replace("\n", ""))


def test_paths_that_match_nothing_are_a_wrong_argument(tmp_path, capsys):
    assert run(capsys, tmp_path / "none-*.tar")[0] == 2


def masks(folder, photos):
    grey = io.BytesIO()
    Image.new("L", (4, 3), 9).save(grey, "png")
    members = [("0.jpg", photos[0].encoded), ("0.seg.png", grey.getvalue())]
    members += [("1.jpg", photos[1].encoded), ("1.seg.png", grey.getvalue()[:50])]
    members += [("2.jpg", photos[2].encoded), ("2.seg.png", photos[2].encoded)]
    (folder / "masks.tar").write_bytes(tar(members))
    return folder / "masks.tar"


def test_all_images_of_a_sample_are_looked_at_in_one_run(photos, tmp_path, capsys):
    path = masks(tmp_path, photos)
    status, out, _ = run(capsys, path, "--json")
    report = json.loads(out)
    assert (status, [*report["others"]]) == (1, ["seg.png"])
    nbytes = report["bytes"] + report["others"]["seg.png"]["bytes"]
    assert nbytes == sum(map(len, members_of(path)))
    assert report["others"]["seg.png"]["images"] == 3
    # Colours are no fault of a member of which nobody says that it has labels.
    assert {code: bad["first"] for code, bad in report["bad_images"].items()} == {
        "truncated": ["1.seg.png"]
    }
    _, out, _ = run(capsys, path)
    assert "with those beside the first: seg.png 3" in out


def members_of(path):
    with tarfile.open(path) as shard:
        return [shard.extractfile(member).read() for member in shard]


def test_one_image_alone_is_looked_at_on_request(photos, tmp_path, capsys):
    path = masks(tmp_path, photos)
    status, out, _ = run(capsys, path, "--image", "seg.png", "--mode", "labels", "--json")
    report = json.loads(out)
    assert (status, report["others"]) == (1, {})
    assert {code: bad["first"] for code, bad in report["bad_images"].items()} == {
        "truncated": ["1"],
        "unsupported-format": ["2"],
    }


def test_an_image_whose_sample_has_a_preferred_one_is_another(photos, tmp_path, capsys):
    png = photos[1].encoded
    members = [("0.jpg", photos[0].encoded), ("0.png", png), ("1.png", png)]
    (tmp_path / "a.tar").write_bytes(tar(members))
    _, out, _ = run(capsys, tmp_path / "a.tar", "--json")
    assert json.loads(out)["others"]["png"]["images"] == 1


def test_describe_tells_of_the_same_images(photos, tmp_path, capsys):
    path = masks(tmp_path, photos)
    cli.main(["describe", str(path)])
    assert re.search(r"\nseg.png  3 images, .*: png 3; smallest 4 × 3, ", capsys.readouterr().out)
    cli.main(["describe", str(path), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["images"], summary["others"]["seg.png"]["images"]) == (3, 3)
    cli.main(["describe", str(path), "--image", "seg.png", "--json"])
    assert json.loads(capsys.readouterr().out)["sizes"]["smallest"] == [4, 3]
