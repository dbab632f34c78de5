"""Texts of exceptions and models reach columns, logs and files, whatever is in them."""

from __future__ import annotations

import json
import logging

import pytest
from photo_shards import write_tar
from pyarrow import parquet

import dask_image_ingest as dii

CUT = json.loads('"A dog \\ud83d"')  # as a model answers whose tokens ended in an emoji


class NoMessageError(Exception):
    def __str__(self):
        raise ValueError("none")


class NoTextError(Exception):
    def __str__(self):
        return None


class NoRepr:
    def __repr__(self):
        raise ValueError("none")


def refuse(key):
    if key.endswith("3"):
        raise ValueError(f"no {CUT}")
    if key.endswith("4"):
        raise NoMessageError
    if key.endswith("5"):
        raise NoTextError
    return NoRepr() if key.endswith("6") else f"{key} {CUT}"


refuse.__qualname__ = "refuse\udce9"


@pytest.fixture
def ddf(tmp_path):
    shard = write_tar(tmp_path / "0.tar", {f"{n:04}.jpg": b"-" for n in range(8)})
    return dii.read_webdataset_images(str(shard), backend="pandas")[["__key__"]]


@pytest.mark.parametrize("verb", ["map_rows", "map_batches"])
def test_messages_and_answers_that_are_no_utf_8_cost_no_other_row(ddf, tmp_path, caplog, verb):
    function = refuse if verb == "map_rows" else lambda keys: [refuse(key) for key in keys]
    function.__qualname__ = refuse.__qualname__
    mapped = getattr(ddf.images, verb)(function, {"o": "string"}, inputs=["__key__"], errors="null")
    with caplog.at_level(logging.WARNING, "dask_image_ingest"):
        stored = dii.checkpoint(mapped, str(tmp_path / "out"), version="1")
    made = parquet.read_table(min((tmp_path / "out").glob("*.parquet"))).to_pandas()
    assert made["o"].tolist()[:3] == [rf"000{n} A dog \ud83d" for n in range(3)]
    assert made["o"].isna().tolist() == [False] * 3 + [True] * 4 + [False]
    reasons = [reason.partition(r"refuse\udce9: ")[2] for reason in made["error"].dropna()]
    assert reasons[:3] == [
        r"ValueError: no A dog \ud83d",
        "NoMessageError: (no message: its __str__ raised ValueError)",
        "NoTextError: (no message: its __str__ raised TypeError)",
    ]
    assert reasons[3].startswith("gave ")
    assert "NoRepr object at" in reasons[3]
    assert r"first sample '0003': function-failed: refuse\udce9: ValueError" in caplog.text
    assert len(stored) == 8
    strict = getattr(ddf.images, verb)(function, {"o": "string"}, inputs=["__key__"])
    with pytest.raises(dii.FunctionError, match=r"sample '0003'.*ValueError: no A dog \\ud83d"):
        strict.compute(scheduler="synchronous")


@pytest.mark.parametrize(
    ("type_", "value", "kept"),
    [
        ("list<string>", ["ä", CUT], ["ä", r"A dog \ud83d"]),
        ("struct<s: string>", {"s": CUT}, {"s": r"A dog \ud83d"}),
    ],
)
def test_a_text_inside_an_answer_is_kept_too(ddf, type_, value, kept):
    for mapped in (
        ddf.images.map_rows(lambda key: value, {"o": type_}, inputs=["__key__"]),
        ddf.images.map_batches(lambda k: [value] * len(k), {"o": type_}, inputs=["__key__"]),
    ):
        (first,) = mapped.compute(scheduler="synchronous")["o"][:1]
        assert first == kept or list(first) == kept
