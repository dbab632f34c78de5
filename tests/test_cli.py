"""The command line: what it prints, for people and for machines, and with which status it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from dask_image_ingest import cli

SIZES = {"000": (40, 30), "001": (64, 48), "002": (100, 20), "003": (8, 8), "004": (500, 375)}


def encoded(size: tuple[int, int], format: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(file, format)
    return file.getvalue()


def write_tar(path, members: dict[str, bytes]):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """Two shards: 5 JPEG with captions, 1 PNG."""
    folder = tmp_path_factory.mktemp("good")
    members = {}
    for key, size in SIZES.items():
        members[f"{key}.jpg"] = encoded(size, "JPEG")
        members[f"{key}.txt"] = f"caption of {key}".encode()
    write_tar(folder / "a-0.tar", members)
    write_tar(folder / "a-1.tar", {"100.png": encoded((10, 10), "PNG"), "100.txt": b"a square"})
    return folder


@pytest.fixture(scope="session")
def bad(tmp_path_factory):
    """One shard: a good image, one with an unreadable header, one cut in the middle of its data."""
    whole = encoded((64, 48), "JPEG")
    members = {"0.jpg": whole, "1.jpg": b"no image at all", "2.jpg": whole[: len(whole) * 2 // 3]}
    return write_tar(tmp_path_factory.mktemp("bad") / "bad.tar", members)


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
    assert exit.value.code == cli.WRONG_ARGUMENTS
    assert "neither KEY=VALUE nor JSON" in capsys.readouterr().err


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_describe_counts_samples_bytes_formats_and_sizes(good, capsys):
    status, out, _ = run(capsys, "describe", good, "--json")
    summary = json.loads(out)

    assert status == 0
    assert (summary["shards"], summary["samples"], summary["images"]) == (2, 6, 6)
    assert summary["formats"] == {"jpeg": 5, "png": 1}
    assert summary["unreadable_headers"] == 0
    assert summary["rgb_bytes"] == 3 * (sum(w * h for w, h in SIZES.values()) + 100)
    jpegs = sum(len(encoded(size, "JPEG")) for size in SIZES.values())
    assert summary["bytes"] == jpegs + len(encoded((10, 10), "PNG"))
    assert "errors" not in summary


def test_describe_shows_the_smallest_the_median_and_the_largest_image(good, capsys):
    _, out, _ = run(capsys, "describe", good / "a-0.tar", "--json")
    by_pixels = sorted(SIZES.values(), key=lambda size: size[0] * size[1])
    assert json.loads(out)["sizes"] == {
        "smallest": list(by_pixels[0]),
        "median": list(by_pixels[2]),
        "largest": list(by_pixels[-1]),
    }


def test_describe_has_a_line_per_shard(good, capsys):
    status, out, _ = run(capsys, "describe", good)
    assert status == 0
    assert "6 samples in 2 shards" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "jpeg 5" in lines["a-0.tar"]
    assert "png 1" in lines["a-1.tar"]
    assert "10 × 10" in lines["a-1.tar"]


def test_describe_decodes_nothing_unless_asked(good, monkeypatch, capsys):
    import dask_image_ingest.decode.dali as dali
    import dask_image_ingest.decode.pillow as pillow

    def fail(*_, **__):
        raise AssertionError("something was decoded")

    monkeypatch.setattr(dali.Decoder, "run", fail)
    monkeypatch.setattr(pillow, "decode_with_pillow", fail)
    assert run(capsys, "describe", good)[0] == 0


def test_describe_finds_unreadable_headers(bad, capsys):
    status, out, _ = run(capsys, "describe", bad, "--json")
    summary = json.loads(out)
    assert status == 1
    assert summary["unreadable_headers"] == 1
    assert summary["samples"] == 3


def test_describe_with_decode_counts_errors_by_code(bad, capsys):
    status, out, _ = run(capsys, "describe", bad, "--decode", "--json")
    errors = json.loads(out)["errors"]
    assert status == 1
    assert sum(errors.values()) == 2
    assert all(":" not in code and " " not in code for code in errors)


def test_describe_tells_people_what_is_bad(bad, capsys):
    status, out, _ = run(capsys, "describe", bad, "--decode")
    assert status == 1
    assert "1 with an unreadable header" in out


def test_sample_without_an_image_is_bad_data(tmp_path, capsys):
    members = {"0.jpg": encoded((8, 8), "JPEG"), "0.txt": b"a", "1.txt": b"no picture"}
    shard = write_tar(tmp_path / "s.tar", members)
    status, out, _ = run(capsys, "describe", shard)
    assert status == 1
    assert "1 without an image" in out


def test_head_prints_the_first_samples(good, capsys):
    status, out, _ = run(capsys, "head", good, "-n", 2, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["__key__"] for row in rows] == ["000", "001"]
    assert [(row["width"], row["height"]) for row in rows] == [SIZES["000"], SIZES["001"]]
    assert rows[1]["txt"] == "caption of 001"
    assert "image" not in rows[0]


def test_head_goes_on_into_later_shards(good, capsys):
    _, out, _ = run(capsys, "head", good, "-n", 50, "--json")
    assert [row["__key__"] for row in json.loads(out)] == [*SIZES, "100"]


def test_head_for_people_fits_the_terminal(good, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, "head", good)
    assert status == 0
    assert "caption of 000" in out
    assert max(map(len, out.splitlines())) <= 80


def test_shard_without_samples_has_its_line(good, tmp_path, capsys):
    empty = write_tar(tmp_path / "empty.tar", {})
    status, out, _ = run(capsys, "describe", good, empty, "--json")
    summary = json.loads(out)
    assert status == 0
    assert summary["shards"] == 3
    assert [(s["url"], s["samples"], s["sizes"]) for s in summary["per_shard"]][-1] == (
        str(empty),
        0,
        {},
    )


@pytest.mark.parametrize("verb", ["describe", "head"])
def test_empty_shard_alone_is_fine(verb, tmp_path, capsys):
    assert run(capsys, verb, write_tar(tmp_path / "empty.tar", {}))[0] == 0


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


@pytest.mark.slow
def test_scheduler_that_does_not_answer_is_a_wrong_argument(good, capsys):
    status, _, err = run(capsys, "describe", good, "--scheduler", "tcp://127.0.0.1:9")
    assert status == 2
    assert "tcp://127.0.0.1:9" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_runs_on_a_cluster_by_its_address(good, capsys):
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as cluster:
        status, out, _ = run(
            capsys, "describe", good, "--json", "--scheduler", cluster.scheduler_address
        )
    assert status == 0
    assert json.loads(out)["samples"] == 6


@pytest.mark.slow
def test_stops_quietly_when_nobody_reads_on(good):
    command = f"{sys.executable} -m dask_image_ingest.cli head {good} | head -n 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    finished = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert finished.stderr == ""
