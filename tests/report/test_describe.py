"""``dask-image-ingest describe``: what is counted, and how machines and people are told."""

from __future__ import annotations

import json
import random
from collections import Counter

import dask.dataframe as dd
import pandas as pd
import pytest
from few_images import SIZES, encoded, write_bad_shard, write_good_shards
from tars import tar

from dask_image_ingest import cli
from dask_image_ingest.report import count_samples, describe_text, is_bad, summarize


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


def random_rows(choose: random.Random, urls: list[str]) -> list[dict]:
    """Rows as a read gives them: in the order of the shards, some without an image or a header."""
    rows = []
    for url in urls:
        for _ in range(choose.choice([0, 1, 7, 30])):
            kind = choose.choices(["image", "unreadable", "missing"], [8, 1, 1])[0]
            height, width = choose.choice([(8, 9), (30, 40), (100, 20)])
            seen = kind == "image"
            error = None if seen and choose.random() < 0.8 else choose.choice(["a: b", "c: d: e"])
            rows.append(
                {
                    "__url__": url,
                    "format": choose.choice(["jpeg", "png"]) if seen else None,
                    "height": height if seen else None,
                    "width": width if seen else None,
                    "nbytes": None if kind == "missing" else choose.randrange(1, 10**6),
                    "error": error,
                }
            )
    return rows


def recounted(rows: list[dict]) -> dict:
    images = [row for row in rows if row["nbytes"] is not None]
    seen = [row for row in images if row["height"]]
    return {
        "samples": len(rows),
        "images": len(images),
        "bytes": sum(row["nbytes"] for row in images),
        "rgb_bytes": 3 * sum(row["height"] * row["width"] for row in seen),
        "unreadable_headers": len(images) - len(seen),
        "formats": Counter(row["format"] for row in seen),
        "errors": Counter(row["error"].split(":")[0] for row in rows if row["error"]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_totals_are_those_of_the_rows_whatever_the_partitions_are(seed):
    choose = random.Random(seed)
    urls = [f"s3://bucket/folder/{number}.tar" for number in range(choose.randrange(1, 5))]
    rows = random_rows(choose, urls)
    types = {"height": "Int32", "width": "Int32", "nbytes": "Int64"} | dict.fromkeys(
        ["__url__", "format", "error"], "string"
    )
    columns = ["__url__", "format", "height", "width", "nbytes", "error"]
    table = pd.DataFrame(rows, columns=columns).astype(types)
    frame = dd.from_pandas(table, npartitions=choose.randrange(1, 6), sort=False)
    summary = summarize(count_samples(frame, decode=True).compute(), urls)

    told = {name: summary[name] for name in recounted(rows)}
    assert told == recounted(rows), f"seed {seed}"
    for url, shard in zip(urls, summary["per_shard"], strict=True):
        expected = recounted([row for row in rows if row["__url__"] == url])
        assert {name: shard[name] for name in expected} == expected, f"seed {seed}"
    assert is_bad(summary) == any(row["error"] or row["nbytes"] is None for row in rows)
    text = describe_text(summary)
    assert f"{len(rows):,} sample" in text
    assert all(url.rpartition("/")[2] in text for url in urls)
