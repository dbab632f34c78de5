"""Workers have DALI ready before the first task."""

import sys

import pytest
from processes import until

import dask_image_ingest as dii

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spawned")]

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")


def is_warm() -> bool:
    """Whether this process has decoded something."""
    warm = sys.modules.get("dask_image_ingest.cluster.warm")
    return warm is not None and "nvidia.dali" in sys.modules and not warm._warming[0].is_alive()


def test_dali_is_there_without_a_task():
    with dii.start_cluster(1, gpu=False, dashboard_address=None) as client:
        until(lambda: all(client.run(is_warm).values()))
