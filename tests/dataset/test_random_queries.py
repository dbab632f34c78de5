"""A lazy read has the answers of the same rows in memory, whatever is asked of it."""

from __future__ import annotations

import pytest
from query_sources import sources
from random_queries import quiet, run

from dask_image_ingest.dataset.plan.scan_node import Scan

pytestmark = pytest.mark.slow

QUERIES = 15


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with quiet():
        return sources(tmp_path_factory.mktemp("queries"))


@pytest.mark.rounds(1, nightly=280)
def test_random_queries_have_the_answers_of_partitions_in_memory(made, seed):
    seeds = range(seed * QUERIES, (seed + 1) * QUERIES)
    found: list[str] = []
    with quiet():
        differences, asked = run(made, seeds, found.append)
    assert not differences, "\n".join(found)
    # Most queries make sense, and some mean something in pandas as well.
    assert asked["nothing"] < len(seeds) / 5
    assert asked["pandas"] > 0


@pytest.mark.nightly
def test_random_queries_notice_partitions_that_are_joined_late(made, monkeypatch):
    monkeypatch.setattr(Scan, "_fusion_compression_factor", 0.01)
    with quiet():
        differences, _ = run(made, range(40), lambda text: None)
    assert differences
