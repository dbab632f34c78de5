"""``dask-image-ingest describe``: what is counted, and how machines and people are told."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter

import pytest
from corpus import images
from few_images import SIZES, encoded, write_bad_shard, write_good_shards
from forked_python import run_python
from tars import header, tar

from dask_image_ingest import cli


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_good_shards(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return write_bad_shard(tmp_path_factory.mktemp("bad"))


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
    assert "bad_images" not in summary


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


@pytest.mark.parametrize("decode", [[], ["--decode"]])
def test_describe_tells_how_many_jpegs_are_baseline(tmp_path, capsys, decode):
    kinds = {
        "jpeg-420": True,
        "jpeg-grey": True,
        "jpeg-progressive": False,
        "jpeg-arithmetic": False,
    }
    members = {f"{name}.jpg": images()[name] for name in kinds}
    (tmp_path / "a.tar").write_bytes(tar(members))
    _, out, _ = run(capsys, "describe", tmp_path, *decode)
    assert "formats  jpeg 4 (2 of the jpeg are baseline)" in out
    _, out, _ = run(capsys, "describe", tmp_path, "--json", *decode)
    assert json.loads(out)["baseline_jpegs"] == sum(kinds.values())


def test_describe_tells_how_many_tiffs_have_several_pages(tmp_path, capsys):
    members = {f"{n}.tif": images()[name] for n, name in enumerate(("tiff-rgb", "tiff-pages"))}
    (tmp_path / "a.tar").write_bytes(tar(members))
    _, out, _ = run(capsys, "describe", tmp_path)
    assert "formats  tiff 2 (1 of the tiff have several pages)" in out
    _, out, _ = run(capsys, "describe", tmp_path, "--json")
    assert json.loads(out)["tiffs_of_several_pages"] == 1


def test_describe_names_shards_that_are_damaged_or_unreadable(good, tmp_path, capsys):
    whole = (good / "a-0.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:-12_000])
    (tmp_path / "none.tar").write_bytes(b"this is no tar" * 100)
    status, out, _ = run(capsys, "describe", tmp_path)
    assert status == 1
    assert f"damaged  {tmp_path}/cut.tar: " in out
    assert f"damaged  {tmp_path}/none.tar: unreadable: " in out


def test_describe_decodes_nothing_unless_asked(good, monkeypatch, capsys):
    import dask_image_ingest.decode.dali as dali
    import dask_image_ingest.decode.pillow as pillow

    def fail(*_, **__):
        raise AssertionError("something was decoded")

    monkeypatch.setattr(dali.DaliDecoder, "run", fail)
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
    errors = json.loads(out)["bad_images"]
    assert status == 1
    assert sum(bad["count"] for bad in errors.values()) == 2
    assert all(":" not in code and " " not in code for code in errors)


def test_describe_tells_people_what_is_bad(bad, capsys):
    status, out, _ = run(capsys, "describe", bad, "--decode")
    assert status == 1
    assert "1 with an unreadable header" in out


def test_sample_without_an_image_is_bad_data(tmp_path, capsys):
    members = {"0.jpg": encoded((8, 8), "JPEG"), "0.txt": b"a", "1.txt": b"no picture"}
    shard = tmp_path / "s.tar"
    shard.write_bytes(tar(members))
    status, out, _ = run(capsys, "describe", shard)
    assert status == 1
    assert "1 without an image" in out


def test_shard_without_samples_has_its_line(good, tmp_path, capsys):
    empty = tmp_path / "empty.tar"
    empty.write_bytes(tar({}))
    status, out, _ = run(capsys, "describe", good, empty, "--json")
    summary = json.loads(out)
    assert status == 0
    assert summary["shards"] == 3
    assert [(s["url"], s["samples"], s["sizes"]) for s in summary["per_shard"]][-1] == (
        str(empty),
        0,
        {},
    )


def random_members(choose: random.Random) -> tuple[dict[str, bytes], list[dict]]:
    """Members of a shard, and what is to be counted of each of its samples."""
    members, samples = {}, []
    for key in range(choose.choice([0, 1, 4, 9])):
        kind = choose.choices(["jpeg", "png", "unreadable", "missing"], [5, 3, 1, 1])[0]
        size = choose.choice([(8, 9), (30, 40), (100, 20)])
        members[f"{key}.txt"] = b"a caption"
        sample = {"kind": kind, "bytes": 0, "pixels": 0}
        if kind != "missing":
            readable = kind in ("jpeg", "png")
            image = encoded(size, kind) if readable else b"no image at all"
            members[f"{key}.{'png' if kind == 'png' else 'jpg'}"] = image
            pixels = size[0] * size[1] if readable else 0
            sample |= {"bytes": len(image), "pixels": pixels}
        samples.append(sample)
    return members, samples


def recounted(samples: list[dict]) -> dict:
    kinds = Counter(sample["kind"] for sample in samples)
    return {
        "samples": len(samples),
        "images": len(samples) - kinds["missing"],
        "bytes": sum(sample["bytes"] for sample in samples),
        "rgb_bytes": 3 * sum(sample["pixels"] for sample in samples),
        "unreadable_headers": kinds["unreadable"],
        "formats": {name: kinds[name] for name in ("jpeg", "png") if kinds[name]},
    }


@pytest.mark.rounds(4, nightly=40)
def test_totals_are_those_of_the_samples(rng, tmp_path, capsys):
    shards = {}
    for number in range(rng.randrange(1, 4)):
        members, samples = random_members(rng)
        shard = tmp_path / f"{number}.tar"
        shard.write_bytes(tar(members))
        shards[str(shard)] = samples
    everything = [sample for samples in shards.values() for sample in samples]
    bad = sum(sample["pixels"] == 0 for sample in everything)

    status, out, _ = run(capsys, "describe", tmp_path, "--decode", "--json")
    summary = json.loads(out)
    expected = recounted(everything)
    assert {name: summary[name] for name in expected} == expected
    assert sum(entry["count"] for entry in summary["bad_images"].values()) == bad
    assert status == (1 if bad else 0)
    told = {shard["url"]: shard for shard in summary["per_shard"]}
    assert list(told) == list(shards)
    for url, samples in shards.items():
        expected = recounted(samples)
        assert {name: told[url][name] for name in expected} == expected


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.newest
def test_a_small_file_that_unpacks_to_a_gigabyte_is_described_in_bounded_memory(tmp_path):
    """In a process of its own, whose peak the system counts."""
    shard = tmp_path / "bomb.tar.gz"
    size = 1 << 30
    with gzip.open(shard, "wb", compresslevel=1) as file:
        file.write(header(b"a.bin", b"%011o\0" % size))
        for _ in range(size >> 24):
            file.write(b"a" * (1 << 24))
        file.write(tar({"a.jpg": encoded((64, 48), "JPEG")}))
    assert shard.stat().st_size < 10 << 20
    script = """
import resource, sys
from dask_image_ingest import cli
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
status = cli.main(["describe", sys.argv[1], "--json"])
print(peak() - before, file=sys.stderr)
sys.exit(status)
"""
    finished = run_python(script, shard)
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert (summary["samples"], summary["images"]) == (1, 1)
    assert int(finished.stderr.split()[-1]) < size / 2
