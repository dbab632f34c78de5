"""A client closes its cluster, also one that fails to."""

import os
import threading

import distributed.nanny
import psutil
import pytest
from distributed import Status

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


def test_workers_that_are_slow_to_end_are_no_error(monkeypatch):
    killed = []
    kill = distributed.nanny.WorkerProcess.kill

    async def slowly(self, *args, **kwargs):
        await kill(self, *args, **kwargs)
        killed.append(self)
        raise TimeoutError

    with dii.start_cluster(2, gpu=False, dashboard_address=None) as client:
        processes = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        monkeypatch.setattr(distributed.nanny.WorkerProcess, "kill", slowly)
    assert len(killed) == 2
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert client.status == "closed"


def test_a_cluster_that_has_failed_to_close_is_not_waited_for():
    client = dii.start_cluster(1, gpu=False, processes=False, dashboard_address=None)
    cluster = client.cluster
    cluster.status = Status.closing
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    cluster.status = Status.running
    cluster.close()
