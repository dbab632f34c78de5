"""Mutated images: no crash, no hang, no lost row, no neighbour touched; `make fuzz` is longer."""

from __future__ import annotations

import pytest
from distributed import Client, LocalCluster
from fuzz import MUTANTS, fuzz

pytestmark = pytest.mark.slow


def test_mutated_images_cost_their_own_rows_only(tmp_path, seed):
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        found = fuzz(client, tmp_path, seed, shards=4, report=lambda *_, **__: None)
    assert found.failures == []
    assert found.mutants == 4 * MUTANTS
    # Neither all refused at first sight, nor hardly hurt.
    assert MUTANTS / 2 < found.decoded < 3.5 * MUTANTS
