"""``quality`` and ``duplicates`` on the command line."""

from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from few_images import encoded, write_bad_shard
from PIL import Image
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import cli


@pytest.fixture
def copies(photos, tmp_path):
    """Two photographs, one of them three times: twice the same bytes, once smaller."""
    one, other = (photo for photo in photos[1:11:5])
    small = Image.fromarray(one.pixels)
    small = small.resize((small.width // 4, small.height // 4))
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
    assert 0 < told.pop("seconds") < 600
    assert 2**24 < told.pop("peak_memory") < 2**40
    assert told == {
        "samples": 4,
        "unknown": 0,
        "duplicates": 1,
        "skipped": [],
        "groups": [
            {
                "keep": {"__key__": "a", "__url__": url},
                "duplicates": [{"__key__": "b", "__url__": url, "distance": 0}],
            }
        ],
    }


def test_duplicates_of_stored_hashes_name_the_row_that_was_kept(copies, tmp_path, capsys):
    kept = dii.read_webdataset_images(copies, backend="pandas")
    dii.curate.write_hashes(kept[kept["__key__"] == "b"], tmp_path / "hashes", "bytes")
    against = ["--by", "bytes", "--against", str(tmp_path / "hashes"), "--memory", "1 GiB"]
    assert cli.main(["duplicates", copies, *against]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[1:] == [f"  {key} of copies.tar: equal to b" for key in "ab"]
    assert cli.main(["duplicates", copies, *against, "--json"]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["keep"] == {"__key__": "b"}


def test_near_duplicates_have_their_distance(copies, capsys):
    arguments = ["--distance", "31", "--keep", "largest", "--json"]
    assert cli.main(["duplicates", copies, *arguments]) == 1
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    found = {row["__key__"]: row["distance"] for row in group["duplicates"]}
    assert group["keep"]["__key__"] == "a"
    assert found["b"] == 0
    assert 0 < found["d"] <= 31


def test_equal_hashes_are_not_said_to_be_equal_pictures(photos, tmp_path, capsys):
    png = tmp_path / "same.png"
    Image.fromarray(photos[1].pixels).save(png)
    shard = tmp_path / "two.tar"
    shard.write_bytes(tar({"a.png": png.read_bytes(), "b.png": png.read_bytes()}))
    assert cli.main(["duplicates", str(shard)]) == 1
    assert "b of two.tar: 0 bits from a of two.tar" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["duplicates", "quality"])
def test_a_shard_that_cannot_be_read_is_named_and_the_others_are_looked_at(copies, verb, capsys):
    junk = Path(copies).with_name("junk.tar")
    junk.write_bytes(b"no tar" * 500)
    assert cli.main([verb, copies, str(junk), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 4
    assert len(told["skipped"]) == 1
    assert "junk.tar" in told["skipped"][0]
    assert cli.main([verb, copies, str(junk)]) == 1
    out = capsys.readouterr()
    assert out.out.partition("skipped: 1 shard\n")[2] == f"  {told['skipped'][0]}\n"
    assert "skipped" not in out.err


def test_image_files_of_a_folder_are_looked_at_too(photos, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jpg").write_bytes(photos[1].encoded)
    assert cli.main(["duplicates", str(tmp_path), "--by", "bytes"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "2 samples, 1 duplicate"
    assert cli.main(["quality", str(tmp_path)]) == 0
    (tmp_path / "empty").mkdir()
    assert cli.main(["quality", str(tmp_path / "empty")]) == 2
    assert "leads to no shard" in capsys.readouterr().err


def test_the_worst_of_an_issue_are_named_first(photos, tmp_path, capsys):
    image = Image.fromarray(photos[1].pixels)
    members = {}
    for name, light in {"a": 0.3, "b": 0.05, "c": 0.2, "d": 1.0}.items():
        file = tmp_path / f"{name}.png"
        image.point(lambda level, light=light: int(level * light)).save(file)
        members[file.name] = file.read_bytes()
    shard = tmp_path / "dark.tar"
    shard.write_bytes(tar(members))
    assert cli.main(["quality", str(shard)]) == 1
    (dark,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dark")]
    assert dark.split()[-3:] == ["b,", "c,", "a"]


def test_the_worst_of_several_shards_are_each_named_once(photos, tmp_path, capsys):
    image, paths = Image.fromarray(photos[1].pixels), []
    for name, light in {"a": 0.2, "b": 0.05, "c": 0.1}.items():
        file = tmp_path / f"{name}.png"
        image.point(lambda level, light=light: int(level * light)).save(file)
        paths.append(tmp_path / f"{name}.tar")
        paths[-1].write_bytes(tar({f"{name}.png": file.read_bytes()}))
    assert cli.main(["quality", *map(str, paths), "--json"]) == 1
    dark = json.loads(capsys.readouterr().out)["issues"]["dark"]
    assert dark["images"] == 3
    assert [sample["__key__"] for sample in dark["samples"]] == ["b", "c", "a"]


@pytest.mark.parametrize("verb", ["duplicates", "quality"])
def test_images_of_parquet_files_are_looked_at_too(photos, verb, tmp_path, capsys):
    dark = io.BytesIO()
    Image.fromarray(photos[1].pixels // 8).save(dark, "PNG")
    files = [photos[1].encoded, photos[1].encoded, photos[6].encoded, dark.getvalue()]
    table = pa.table({"image": [{"bytes": file, "path": None} for file in files]})
    pq.write_table(table, tmp_path / "photos.parquet", row_group_size=2)
    page = tmp_path / "page.html"
    by = ["--by", "bytes"] if verb == "duplicates" else []
    arguments = [verb, str(tmp_path / "photos.parquet"), "--json", "--html", str(page), *by]
    assert cli.main(arguments) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == 4
    if verb == "duplicates":
        assert told["duplicates"] == 1
    else:
        (sample,) = told["issues"]["dark"]["samples"]
        assert sample["__key__"] == "photos/00000003"
    assert "data:image/jpeg;base64," in page.read_text()


@pytest.mark.parametrize("verb", ["duplicates", "quality"])
def test_a_page_shows_what_is_told(copies, verb, tmp_path, capsys):
    page = tmp_path / "page.html"
    cli.main([verb, copies, "--html", str(page)])
    html = page.read_text()
    assert ("Duplicate groups" if verb == "duplicates" else "quality.dark") in html
    assert "data:image/jpeg;base64," in html


class Closed(io.TextIOBase):
    """A pipe that nobody reads."""

    asked = 0

    def write(self, text):
        self.asked += 1
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.filterwarnings("always:the first shard")
def test_work_is_done_though_nobody_reads_what_is_printed(photos, tmp_path, monkeypatch):
    """As in ``... 2>&1 | head -n 0``: files are written, and the status is that of the work."""
    shard = tmp_path / "copies.tar"
    shard.write_bytes(tar({"a.jpg": photos[1].encoded, "b.jpg": photos[1].encoded}))
    for file, status, *command in (
        ("quality.html", 0, "quality", "--html"),
        ("duplicates.html", 1, "duplicates", "--html"),
        ("gallery.html", 0, "gallery", "-o"),
        ("indexes", 0, "index", "-o"),
        ("out/{shard}.tar", 0, "export", "--json-field", "missing=string", "-o"),
    ):
        out, told = Closed(), Closed()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", told)
        verb, *options = command
        assert cli.main([verb, str(shard), "--json", *options, str(tmp_path / file)]) == status
        sys.stdout.close()  # in place of the pipe
        assert (tmp_path / file.format(shard=0)).exists(), verb
        assert out.asked, verb
    assert told.asked  # the export warns that no sample has the field


def test_a_collection_without_duplicates_is_fine(shards, capsys):
    paths = [str(shard) for shard in shards]
    assert cli.main(["duplicates", *paths, "--by", "bytes"]) == 0
    assert capsys.readouterr().out == "24 samples, 0 duplicates\n"


def test_images_that_cannot_be_compared_are_told_and_no_success(photos, tmp_path, capsys):
    half = photos[1].encoded[: len(photos[1].encoded) // 2]
    damaged = {"cut.jpg": half, "text.jpg": b"no image", "empty.jpg": b""}
    for by, unknown in {"pdq": 3, "pixels": 3, "bytes": 2}.items():
        shard = tmp_path / f"{by}.tar"
        shard.write_bytes(tar({"a.jpg": photos[6].encoded, **damaged}))
        assert cli.main(["duplicates", str(shard), "--by", by]) == 1
        text = f"4 samples, 0 duplicates, {unknown} without an image that decodes\n"
        assert capsys.readouterr().out == text
        assert cli.main(["duplicates", str(shard), "--by", by, "--json"]) == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["samples"], told["unknown"], told["duplicates"]) == (4, unknown, 0)


def test_quality_counts_issues_and_names_who_has_them(tmp_path, capsys):
    write_bad_shard(tmp_path)
    assert cli.main(["quality", str(tmp_path / "bad.tar"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["unknown"]) == (3, 2)
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
    [["--distance", "65"], ["--keep", "prettiest"], ["--by", "bytes", "--variants=mirrored"]],
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
