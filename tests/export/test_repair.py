"""A damaged collection comes out sound, and it is said what of it did not."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from tars import tar
from witnesses import by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest import cli


@pytest.fixture
def damaged(photos, tmp_path):
    """Six shards: sound, truncated, interleaved, with duplicates, with bad images, no tar."""
    folder = tmp_path / "in"
    folder.mkdir()
    parts = [photos[start : start + 4] for start in range(0, 20, 4)]

    def members(part, bad=()):
        return [
            (f"{photo.key}.{e}", dict(bad).get(photo.key, data) if e == photo.extension else data)
            for photo in part
            for e, data in photo.members.items()
        ]

    (folder / "0.tar").write_bytes(tar(members(parts[0])))
    cut = tar(members(parts[1]))
    (folder / "1.tar").write_bytes(cut[: cut.index(parts[1][3].encoded) + 100])
    mixed = members(parts[2])
    (folder / "2.tar").write_bytes(tar([*mixed[::2], *mixed[1::2]]))
    twice = members(parts[3])
    (folder / "3.tar").write_bytes(tar([*twice[:1], *twice]))
    bad = {parts[4][1].key: b"no image", parts[4][2].key: parts[4][2].encoded[:200]}
    (folder / "4.tar").write_bytes(tar(members(parts[4], bad)))
    (folder / "5.tar").write_bytes(b"this is no tar" * 100)
    lost = {parts[1][3].key, parts[3][0].key, *bad}
    return folder, {p.key: p.members for part in parts for p in part if p.key not in lost}


def run(capsys, *arguments) -> tuple[int, dict]:
    status = cli.main(["export", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert status < 2, captured.err
    return status, json.loads(captured.out)


def test_what_is_left_is_sound_and_what_is_not_is_told(damaged, tmp_path, capsys):
    folder, expected = damaged
    out = tmp_path / "out"
    template = out / "{shard:02d}.tar"
    status, told = run(
        capsys, folder, "-o", template, "--samples-per-shard", 3, "--drop-bad-images"
    )
    assert dict(by_webdataset(shards_in(out))) == expected
    assert cli.main(["check", str(out)]) == 0
    assert "apart from each other" not in capsys.readouterr().out
    assert status == 1
    assert {code: entry["count"] for code, entry in told["left_out"].items()} == {
        "bad-image": 3,  # the sample with a member twice is one of them, as for the reader
    }
    assert told["interleaved"] == 4
    assert {url.rpartition("/")[2]: d.partition(":")[0] for url, d in told["damaged"].items()} == {
        "1.tar": "truncated-member",
    }
    (skipped,) = told["skipped"]
    assert "5.tar is no tar archive" in skipped
    reasons = pd.read_parquet(out / "_left_out.parquet")["reason"].str.split(":").str[1].str.strip()
    assert sorted(reasons) == ["duplicate-member", "not-an-image", "truncated"]


def test_bad_images_are_kept_unless_they_are_not_wanted(damaged, tmp_path, capsys):
    folder, expected = damaged
    out = tmp_path / "out"
    status, told = run(capsys, folder, "-o", out / "{shard:02d}.tar")
    found = dict(by_webdataset(shards_in(out)))
    assert found.items() >= expected.items()
    assert len(found) == len(expected) + 2
    assert told["left_out"]["duplicate-member"]["count"] == 1
    assert status == 1


def test_a_strict_export_writes_nothing(damaged, tmp_path, capsys):
    folder, _ = damaged
    out = tmp_path / "out"
    status = cli.main(["export", str(folder), "-o", str(out / "{shard}.tar"), "--strict"])
    assert status == 1
    assert "duplicate-member" in capsys.readouterr().err
    assert not out.exists()


def test_a_frame_of_good_images_is_exported_without_a_word(damaged, tmp_path):
    folder, expected = damaged
    paths = sorted(folder.glob("[0-4].tar"))
    frame = dii.read_webdataset_images(paths, backend="pandas")
    good = frame[frame.error.isna()]
    with pytest.warns(UserWarning, match="1.tar is damaged at byte"):
        told = dii.to_webdataset(good, tmp_path / "out" / "{shard}.tar")
    assert dict(by_webdataset(shards_in(tmp_path / "out"))) == expected
    assert told.attrs["left_out"] == {}
    assert list(told.attrs["damaged"]) == [str(folder / "1.tar")]
