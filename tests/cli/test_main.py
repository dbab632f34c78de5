"""The command line: what it prints, for people and for machines, and with which status it ends."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from decimal import Decimal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from few_images import SIZES, encoded, write_good_shards
from fsspec.implementations.local import LocalFileSystem
from tars import tar

import dask_image_ingest
from dask_image_ingest import cli, read_webdataset_images
from dask_image_ingest.cli.main import make_parser
from dask_image_ingest.cli.verbs import WRONG_ARGUMENTS

MAIN = "import sys; from dask_image_ingest.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_good_shards(tmp_path_factory.mktemp("good"))


class LockedFileSystem(LocalFileSystem):
    """Local files for whoever says the word."""

    protocol = "locked"

    def __init__(self, word=None, tries=0, **options):
        super().__init__(**options)
        if (word, tries) != ("open sesame", 3):
            raise PermissionError(f"{word!r}, {tries!r}")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("locked://"))


fsspec.register_implementation("locked", LockedFileSystem, clobber=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["word=open sesame", "tries=3"],
        ['{"word": "open sesame", "tries": 3}'],
        ["word=wrong", '{"word": "open sesame"}', "tries=3"],
    ],
    ids=str,
)
@pytest.mark.parametrize("verb", ["describe", "head", "check", "gallery"])
def test_every_command_takes_storage_options(capsys, good, tmp_path, monkeypatch, verb, options):
    monkeypatch.chdir(tmp_path)
    url = f"locked://{good}/a-1.tar"
    told = [part for option in options for part in ("--storage-options", option)]
    status, out, err = run(capsys, verb, url, *told)
    assert status == 0, err
    assert out
    status, _, err = run(capsys, verb, url, "--storage-options", "word=no")
    assert status
    assert "'no', 0" in err


@pytest.mark.parametrize("option", ["word", "=3", "[1]", "{"])
def test_storage_options_that_are_none_are_refused(capsys, good, option):
    with pytest.raises(SystemExit) as exit:
        run(capsys, "head", good, "--storage-options", option)
    assert exit.value.code == WRONG_ARGUMENTS
    assert "neither KEY=VALUE nor JSON" in capsys.readouterr().err


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_head_prints_the_first_samples(good, capsys):
    status, out, _ = run(capsys, "head", good, "-n", 2, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["__key__"] for row in rows] == ["000", "001"]
    assert [(row["width"], row["height"]) for row in rows] == [SIZES["000"], SIZES["001"]]
    assert rows[1]["txt"] == "caption of 001"
    assert "image" not in rows[0]


def test_head_prints_every_type_of_a_parquet_file_beside_the_shard(tmp_path, capsys):
    write_good_shards(tmp_path)
    moment = datetime.datetime(2020, 1, 2, 3, 4, 5, 678901)
    values = {
        "when": pa.scalar(moment, pa.timestamp("us")),
        "nanoseconds": pa.scalar(moment, pa.timestamp("ns")),
        "zoned": pa.scalar(moment, pa.timestamp("us", "UTC")),
        "day": pa.scalar(moment.date()),
        "hour": pa.scalar(moment.time()),
        "lasts": pa.scalar(datetime.timedelta(days=1, seconds=2)),
        "price": pa.scalar(Decimal("12.30")),
        "small": pa.scalar(0.1, pa.float32()),
        "raw": pa.scalar(b"\x00\xff"),
        "infinite": pa.scalar(float("inf")),
        "nested": pa.scalar([{"when": moment, "raw": b"a"}]),
        "none": pa.scalar(None, pa.int64()),
    }
    for shard, keys in (("a-0", [*SIZES]), ("a-1", ["100"])):
        columns = {name: pa.repeat(value, len(keys)) for name, value in values.items()}
        pq.write_table(pa.table({"key": keys, **columns}), tmp_path / f"{shard}.parquet")
    options = ["-n", 1, "--json", "--read-sidecar", "parquet"]
    status, out, _ = run(capsys, "head", tmp_path, *options)
    assert status == 0
    (row,) = json.loads(out, parse_constant=pytest.fail, parse_float=Decimal)
    assert {name: row[name] for name in values} == {
        "when": "2020-01-02T03:04:05.678901",
        "nanoseconds": "2020-01-02T03:04:05.678901",
        "zoned": "2020-01-02T03:04:05.678901+00:00",
        "day": "2020-01-02",
        "hour": "03:04:05.678901",
        "lasts": "P1DT0H0M2S",
        "price": Decimal("12.30"),
        "small": Decimal("0.1"),
        "raw": "AP8=",
        "infinite": None,
        "nested": [{"when": "2020-01-02T03:04:05.678901", "raw": "YQ=="}],
        "none": None,
    }


def test_head_goes_on_into_later_shards(good, capsys):
    _, out, _ = run(capsys, "head", good, "-n", 50, "--json")
    assert [row["__key__"] for row in json.loads(out)] == [*SIZES, "100"]


def test_head_for_people_fits_the_terminal(good, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "head", good)
    assert status == 0
    assert "caption of 000" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("verb", ["describe", "head"])
def test_empty_shard_alone_is_fine(verb, tmp_path, capsys):
    (tmp_path / "empty.tar").write_bytes(tar({}))
    assert run(capsys, verb, tmp_path / "empty.tar")[0] == 0


@pytest.mark.parametrize("verb", ["describe", "head"])
def test_path_that_matches_nothing_is_a_wrong_argument(verb, tmp_path, capsys):
    status, out, err = run(capsys, verb, tmp_path / "none-*.tar")
    assert (status, out) == (2, "")
    assert "none-*.tar" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [[], ["describe"], ["guess", "x.tar"], ["head", "x.tar", "-n", "0"]]
)
def test_wrong_usage_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: dask-image-ingest" in capsys.readouterr().err


def printed(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_the_version_is_printed(capsys):
    assert printed(["--version"], capsys) == f"dask-image-ingest {dask_image_ingest.__version__}\n"


@pytest.mark.parametrize(
    "verb", ["describe", "head", "check", "gallery", "index", "quality", "duplicates", "export"]
)
def test_help_has_an_example_and_says_what_each_option_does(verb, capsys):
    told = " ".join(printed([verb, "--help"], capsys).split())
    assert f"Example: dask-image-ingest {verb} " in told
    example = shlex.split(told.partition("Example: dask-image-ingest ")[2])
    assert make_parser().parse_args(example).paths
    for action in make_parser()._subparsers._group_actions[0].choices[verb]._actions:
        assert action.help, action.option_strings


@pytest.mark.slow
@pytest.mark.more
def test_scheduler_that_does_not_answer_is_a_wrong_argument(good, capsys):
    status, _, err = run(capsys, "describe", good, "--scheduler", "tcp://127.0.0.1:9")
    assert status == 2
    assert "tcp://127.0.0.1:9" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_runs_on_a_cluster_by_its_address(good, cluster, capsys):
    address = cluster.scheduler_address
    status, out, _ = run(capsys, "describe", good, "--json", "--scheduler", address)
    assert status == 0
    assert json.loads(out)["samples"] == 6


@pytest.mark.slow
def test_stops_quietly_when_nobody_reads_on(good):
    command = f'{sys.executable} -c "{MAIN}" head {good} | head -n 0'
    shell = ["bash", "-o", "pipefail", "-c", command]
    finished = subprocess.run(shell, capture_output=True, text=True, timeout=280)
    assert finished.stderr == ""


def test_index_writes_what_a_read_finds(capsys, good, tmp_path):
    url = f"{good}/*.tar"
    status, out, err = run(capsys, "index", url, "-o", str(tmp_path / "indexes"))
    assert (status, err) == (0, "")
    assert out.startswith("written 2: 6 samples in 2 shards, ")
    status, out, _ = run(capsys, "index", url, "-o", str(tmp_path / "indexes"), "--json")
    assert status == 0
    told = json.loads(out)
    assert [index["state"] for index in told] == ["kept"] * 2
    frame = read_webdataset_images(url, backend="pandas", index=tmp_path / "indexes")
    assert len(frame) == sum(index["samples"] for index in told)


def test_index_combined_writes_one_file_for_all(capsys, good, tmp_path):
    url = f"{good}/*.tar"
    status, out, _ = run(capsys, "index", url, "-o", str(tmp_path), "--combined")
    assert (status, out[:9]) == (0, "written 2")
    assert [path.name for path in tmp_path.iterdir()] == ["_index.parquet"]
    size = (tmp_path / "_index.parquet").stat().st_size
    status, out, _ = run(capsys, "index", url, "-o", str(tmp_path), "--combined", "--json")
    told = json.loads(out)
    assert [index["state"] for index in told] == ["kept"] * 2
    assert 0 <= size - sum(index["bytes"] for index in told) < 2


def test_index_names_what_is_no_shard(capsys, good, tmp_path):
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"no tar at all" * 100)
    status, out, _ = run(capsys, "index", str(bad), f"{good}/a-1.tar", "-o", str(tmp_path))
    assert status == 1
    assert "failed 1, written 1" in out
    assert "bad.tar is no tar archive" in out


def test_texts_of_the_web_do_not_steer_the_terminal(tmp_path, capsys):
    evil = "a\nb\r\x1b]0;t\x07\x9b1m\u202e日本ü"
    members = {
        "a\x1b[31m.jpg": b"none",
        "a\x1b[31m.txt": evil.encode(),
        "a\x1b[31m.json": json.dumps({"of": ["\x1b[2J"]}).encode(),
    }
    (tmp_path / "a.tar").write_bytes(tar(members))
    evil_column = pa.array(["a\x1b[31m"])
    lists = pa.array([["\x1b[2J", "b"]])
    sidecar = pa.table({"__key__": evil_column, "in\x1b[2Jside": [1.5], "list": lists})
    pq.write_table(sidecar, tmp_path / "a.parquet")
    cli.main(["head", str(tmp_path / "a.tar"), "--read-sidecar", "parquet"])
    out = capsys.readouterr().out
    assert all(sign.isprintable() for sign in out.replace("\n", ""))
    assert r"a\nb\r\x1b]0;t\x07\x9b1m\u202e日本ü" in out
    for shown in (r"a\x1b[31m", r"in\x1b[2Jside", "1.5"):
        assert shown in out
    assert out.count(r"\x1b[2J") == 2


def test_a_number_of_rows_has_to_be_positive(good, capsys):
    for number in ("0", "-3", "few"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["head", f"-n={number}", str(good)])
        assert ended.value.code == WRONG_ARGUMENTS
        told = capsys.readouterr().err
        assert f"argument -n: '{number}': pass a whole number of at least 1" in told


@pytest.mark.slow
def test_output_that_has_no_room_is_told_without_a_traceback(good):
    command = [sys.executable, "-c", MAIN, "describe", str(good)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "dask-image-ingest: cannot write the output: [Errno 28] No space left on device\n"
    assert (ended.returncode, ended.stderr) == (WRONG_ARGUMENTS, told)


VERBS = """
import sys
from dask_image_ingest.cli import main

for verb in ("describe", "head", "check", "index"):
    assert main([verb, sys.argv[1]]) == 0, verb
"""


@pytest.mark.slow
@pytest.mark.more
def test_whatever_letters_the_locale_knows_it_prints_all_of_them(tmp_path):
    """Those that it does not know with escapes; in a process that has this locale."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar({"ä.jpg": encoded((8, 8), "JPEG"), "ä.txt": "Grüße, 世界".encode()}))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    finished = subprocess.run(
        [sys.executable, "-c", VERBS, path],
        capture_output=True,
        env=os.environ | ascii_only,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr.decode()
    out = finished.stdout.decode("ascii")
    assert r"Gr\xfc\xdfe, \u4e16\u754c" in out
    assert r"8 \xd7 8" in out
