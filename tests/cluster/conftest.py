"""Workers as `start_cluster` starts them for its users."""

import dask
import pytest


@pytest.fixture(autouse=True, scope="module")
def spawned():
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        yield
