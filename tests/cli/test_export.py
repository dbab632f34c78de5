"""``dask-image-ingest export``: what it writes and prints, and with which status it ends."""

from __future__ import annotations

import io
import json
import shutil

import pandas as pd
import pytest
from PIL import Image
from tars import tar
from witnesses import by_dali, by_webdataset, shards_in

import dask_image_ingest as dii
from dask_image_ingest import cli


def run(capsys, *arguments):
    status = cli.main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def folder(shards):
    return shards[0].parent


def test_rows_that_meet_a_condition_become_shards(folder, photos, tmp_path, capsys):
    where = "width >= 150 and json.similarity > 0.3 and not format in ['webp']"
    options = ["--samples-per-shard", 4, "--index", "--json-field", "source.name=string"]
    template = tmp_path / "{shard:06d}.tar"
    status, out, err = run(capsys, folder, "-o", template, "--where", where, *options)
    expected = [
        (p.key, p.members)
        for p in photos
        if p.pixels.shape[1] >= 150 and p.similarity > 0.3 and p.extension != "webp"
    ]
    assert (status, err) == (0, "")
    paths = shards_in(tmp_path)
    assert by_webdataset(paths) == expected
    assert f"{tmp_path}: {len(expected)} samples in {len(paths)} shards" in out
    sidecar = pd.read_parquet(tmp_path / "000000.parquet")
    assert sidecar["json.source.name"].tolist() == sidecar["__key__"].tolist()
    assert sidecar["json.similarity"].gt(0.3).all()
    assert len(by_dali(paths, ["txt"], sorted(tmp_path.glob("*.idx")))) == len(expected)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("quality.blur > 0.5 and width >= 150", []),
        ("quality.blur > 0.5 and width >= 150 or quality.dark < 0.1", []),
        ("not quality.blur <= 0.5 and 150 <= width", ["--drop-bad-images"]),
    ],
)
def test_signals_of_quality_are_conditions_too(folder, tmp_path, capsys, where, options):
    signals = dii.curate.measure_quality(
        dii.read_webdataset_images(folder, backend="pandas")
    ).compute()
    kept = signals[(signals["quality.blur"] > 0.5) & (signals["width"] >= 150)]
    assert 0 < len(kept) < len(signals)
    template = tmp_path / "{shard:06d}.tar"
    status, *_ = run(capsys, folder, "-o", template, "--where", where, *options)
    assert status == 0
    sidecar = pd.read_parquet(tmp_path / "000000.parquet")
    assert sidecar["__key__"].tolist() == kept["__key__"].tolist()
    assert (sidecar["quality.blur"] > 0.5).all()


def test_a_signal_that_there_is_not_is_named(folder, tmp_path, capsys):
    status, _, err = run(
        capsys, folder, "-o", tmp_path / "{shard:06d}.tar", "--where", "quality.beauty > 1"
    )
    assert status == 2
    assert "there is no column 'quality.beauty'" in err


@pytest.mark.parametrize(("by", "left"), [("bytes", 20), ("pdq", 12)])
def test_an_image_that_is_there_twice_is_written_once(photos, tmp_path, capsys, by, left):
    members = {}
    for number, photo in enumerate(photos[:12]):
        members[f"{number}.{photo.extension}"] = photo.encoded
        if number % 3:
            encoded = io.BytesIO()
            Image.fromarray(photo.pixels).save(encoded, "BMP")
            members[f"again-{number}.bmp"] = encoded.getvalue()
        else:
            members[f"again-{number}.{photo.extension}"] = photo.encoded
    (tmp_path / "in.tar").write_bytes(tar(members))
    status, out, _ = run(
        capsys, tmp_path / "in.tar", "-o", tmp_path / "out/{shard}.tar", "--drop-duplicates", by
    )
    assert status == 0
    assert f"{left} samples in 1 shards" in out
    assert f"{24 - left} duplicates are not written" in out


@pytest.mark.filterwarnings("ignore:.*of 'json.id' are not:UserWarning")
def test_json_numbers_that_no_double_holds_are_told_from_their_neighbours(photos, tmp_path, capsys):
    ids = [2**53, 2**53 + 1, 2**53 + 2, 2**53 + 1.5, "9007199254740993", None, 2**64 - 1, 1]
    members = {}
    for number, value in enumerate(ids):
        members[f"{number}.jpg"] = photos[0].encoded
        members[f"{number}.json"] = json.dumps(
            {"id": value, "class": 3 + number, "from": "abcdefgh"[number]}
        ).encode()
    (tmp_path / "in.tar").write_bytes(tar(list(members.items())))

    def kept(where, *options):
        target = tmp_path / "out" / "{shard:01d}.tar"
        where = ["--where", where, "--overwrite", *options]
        status, _, err = run(capsys, tmp_path / "in.tar", "-o", target, *where)
        assert (status, err) == (0, "")
        return [key for key, _ in by_webdataset(shards_in(tmp_path / "out"))]

    whole = ["--json-field", "id=int64"]
    assert kept("json.id == 9007199254740993", *whole) == ["1"]
    assert kept("json.id in [9007199254740992, 1]", *whole) == ["0", "7"]
    assert kept("json.id > 9007199254740992", "--json-field", "id=int64") == ["1", "2", "3"]
    assert kept("json.class == 3 or json.from in ['b']") == ["0", "1"]
    template = tmp_path / "out" / "{shard:01d}.tar"
    status, _, err = run(
        capsys, tmp_path / "in.tar", "-o", template, "--where", f"json.id > {2**53}"
    )
    assert status == 2
    assert "--json-field id=int64" in err


@pytest.mark.parametrize("members", ["txt,cls", "txt;cls", " .txt , CLS"])
def test_members_are_separated_by_commas_or_semicolons(folder, photos, tmp_path, capsys, members):
    assert run(capsys, folder, "-o", tmp_path / "{shard}.tar", "--members", members)[0] == 0
    expected = [(p.key, {e: p.members[e] for e in ("txt", "cls")}) for p in photos]
    assert by_webdataset(shards_in(tmp_path)) == expected


def test_json_says_what_was_written(folder, tmp_path, capsys):
    template = tmp_path / "{shard:02d}.tar"
    _, out, _ = run(capsys, folder, "-o", template, "--bytes-per-shard", "200kB", "--json")
    told = json.loads(out)
    paths = shards_in(tmp_path)
    assert told["samples"] == sum(shard["samples"] for shard in told["per_shard"]) == 24
    assert told["members"] == 4 * 24
    assert [shard["bytes"] for shard in told["per_shard"]] == [p.stat().st_size for p in paths]
    assert all(path.stat().st_size <= 200_000 for path in paths)
    assert (told["left_out"], told["damaged"]) == ({}, {})


def test_members_sidecars_and_order_can_be_chosen(folder, photos, tmp_path, capsys):
    options = ["--members", "jpg,txt", "--no-sidecar", "--shuffle", 7]
    run(capsys, folder, "-o", tmp_path / "{shard}.tar", *options)
    found = by_webdataset(shards_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".parquet"] == []
    wanted = {p.key: {e: d for e, d in p.members.items() if e in ("jpg", "txt")} for p in photos}
    assert dict(found) == wanted
    assert [key for key, _ in found] != [photo.key for photo in photos]


def test_a_second_run_is_refused_resumed_or_overwrites(folder, tmp_path, capsys):
    template = tmp_path / "{shard}.tar"
    run(capsys, folder, "-o", template)
    status, _, err = run(capsys, folder, "-o", template)
    assert status == 1
    assert "has an export of 24 samples" in err
    assert run(capsys, folder, "-o", template, "--resume")[0] == 0
    assert run(capsys, folder, "-o", template, "--overwrite", "--where", "cls == 1")[0] == 0
    assert len(by_webdataset(shards_in(tmp_path))) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "width >"], "is no condition"),
        (["--where", "nothing > 3"], "'nothing'"),
        (["--where", "width == 'a'"], "the column is of type int32"),
        (["--json-field", "similarity"], "similarity=float32"),
        (["--json-field", "similarity=number"], "'number' is no type of a column"),
        (["--samples-per-shard", "0"], "samples_per_shard=0"),
        (["--bytes-per-shard", "much"], "bytes_per_shard='much'"),
        (["--resume", "--overwrite"], "choose one"),
    ],
)
def test_wrong_arguments_end_with_2(options, said, folder, tmp_path, capsys):
    status, out, err = run(capsys, folder, "-o", tmp_path / "out" / "{shard}.tar", *options)
    assert status == 2
    assert said in err
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_no_output_is_a_wrong_argument(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(folder)])
    assert ended.value.code == 2
    assert "-o" in capsys.readouterr().err


def test_sidecars_of_the_source_are_asked_and_passed_on(folder, photos, tmp_path, capsys):
    source = shutil.copytree(folder, tmp_path / "in")
    for number, path in enumerate(sorted(source.glob("*.tar"))):
        mine = photos[8 * number : 8 * number + 8]
        scores = {
            "key": [photo.key for photo in mine],
            "score": [photo.similarity for photo in mine],
        }
        pd.DataFrame(scores).to_parquet(path.with_suffix(".parquet"))
    where = ["--read-sidecar", "parquet", "--where", "score > 0.5"]
    status, _, _ = run(capsys, source, "-o", tmp_path / "out" / "{shard}.tar", *where)
    kept = [photo for photo in photos if photo.similarity > 0.5]
    assert status == 0
    assert by_webdataset(shards_in(tmp_path / "out")) == [(p.key, p.members) for p in kept]
    written = pd.read_parquet(tmp_path / "out" / "0.parquet")
    assert written["score"].tolist() == [photo.similarity for photo in kept]


def test_shards_of_which_nothing_is_exported_are_read_once(folder, photos, tmp_path, capsys):
    log = tmp_path / "log"
    commands = [f"pipe:echo {n} >> {log}; cat {folder}/photos-00{n}.tar" for n in range(3)]
    options = ["--where", f"__key__ < '{photos[8].key}'", "--storage-options", "allow_pipes=true"]
    assert run(capsys, *commands, "-o", tmp_path / "{shard}.tar", *options)[0] == 0
    assert [key for key, _ in by_webdataset(shards_in(tmp_path))] == [p.key for p in photos[:8]]
    runs = log.read_text().split()
    assert (runs.count("1"), runs.count("2")) == (1, 1)


def test_storage_options_reach_the_sources(folder, photos, tmp_path, capsys):
    commands = f"pipe:cat {folder}/photos-{{000..002}}.tar"
    target = ["-o", tmp_path / "{shard}.tar"]
    status, _, err = run(capsys, commands, *target)
    assert status == 2
    assert "is a command" in err
    status, _, _ = run(capsys, commands, *target, "--storage-options", "allow_pipes=true")
    assert status == 0
    assert by_webdataset(shards_in(tmp_path)) == [(p.key, p.members) for p in photos]


def test_a_strict_export_of_rows_that_are_refused_has_found_bad_data(tmp_path, capsys):
    (tmp_path / "in.tar").write_bytes(tar([("a.jpg", b"1"), ("a.jpg", b"2"), ("b.jpg", b"3")]))
    template = tmp_path / "out" / "{shard:06d}.tar"
    status, _, err = run(capsys, tmp_path / "in.tar", "-o", template, "--strict")
    assert status == 1
    assert "1 of 2 rows cannot be exported" in err
    assert not template.parent.exists()
    assert run(capsys, tmp_path / "in.tar", "-o", template)[0] == 1
    assert (
        run(capsys, tmp_path / "in.tar", "-o", template, "--strict", "--resume", "--overwrite")[0]
        == 2
    )
