"""Braces mean the paths that webdataset makes of them, and no pattern means more than can be."""

from __future__ import annotations

import pytest
from braceexpand import braceexpand

import dask_image_ingest as dii
from dask_image_ingest.storage.patterns import expand_braces

PARTS = ["a", "-", ",", "{", "}", "{0..9}", "{007..-3..2}", "{b..k}", "{x,y}", "{}", "{5}", ".."]


@pytest.mark.rounds(1, nightly=20)
def test_patterns_mean_what_webdataset_makes_of_them(rng):
    balanced = 0
    for _ in range(800):
        pattern = "".join(rng.choices(PARTS, k=rng.randrange(1, 9)))
        try:
            expected = list(braceexpand(pattern, escape=False))
        except ValueError:
            with pytest.raises(dii.ArgumentError, match="unbalanced braces"):
                expand_braces(pattern)
            continue
        balanced += 1
        assert expand_braces(pattern) == expected
    assert balanced > 80


def test_braces_that_mean_more_than_anybody_has_are_refused_at_once():
    for pattern in (
        "d/{0..99999999999}.tar",
        "{-99999999999..0..3}.tar",
        "pipe:cat {0..99999999999}.tar",
        "s3://bucket/{0..99999999999}.tar",
        "{00000..99999999999999999999999999999999}.tar",
    ):
        with pytest.raises(dii.ArgumentError, match="means more than 10,000,000 paths"):
            expand_braces(pattern)


@pytest.mark.more
def test_products_of_ranges_are_counted():
    with pytest.raises(dii.ArgumentError, match="means more than 10,000,000 paths"):
        expand_braces("{0..9999}{0..9999}.tar")


def test_odd_braces_are_an_error_of_this_package():
    for pattern in ("{1..2}" * 5000, "{" * 5000 + "}" * 5000, "{1.." + "9" * 9999):
        with pytest.raises(dii.ArgumentError, match="braces"):
            expand_braces(pattern)


def test_a_range_of_a_million_is_none_too_many():
    assert len(expand_braces("{000000..999999}.tar")) == 10**6


def test_what_exists_under_such_a_name_is_read(tmp_path, shards):
    path = tmp_path / "{0..99999999999}.tar"
    path.write_bytes(shards[0].read_bytes())
    assert len(dii.read_webdataset_images(path, backend="pandas")) == 8
    with pytest.raises(dii.ArgumentError, match="more than 10,000,000"):
        dii.read_webdataset_images(tmp_path / "{0..99999999998}.tar", backend="pandas")
