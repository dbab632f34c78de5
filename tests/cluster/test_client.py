"""A client closes its cluster, also one that fails to."""

import copy
import os
import threading

import dask
import distributed.nanny
import psutil
import pytest
from distributed import Client, LocalCluster, Status
from processes import SECONDS

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
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]
    assert client.status == "closed"


def test_a_cluster_that_has_failed_to_close_is_not_waited_for():
    client = dii.start_cluster(1, gpu=False, processes=False, dashboard_address=None)
    cluster = client.cluster
    cluster.status = Status.closing
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
    cluster.status = Status.running
    cluster.close()


@pytest.mark.parametrize("processes", [True, False])
def test_what_fails_to_connect_leaves_nothing_behind(processes, monkeypatch):
    before = copy.deepcopy(dask.config.get("image-ingest", None))
    others = {*LocalCluster._instances}

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, dask.config.set(scheduler=None):
        patched.setattr(Client, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dii.start_cluster(1, gpu=False, processes=processes, dashboard_address=None)
    made = {*LocalCluster._instances} - others
    assert {cluster.status for cluster in made} == {Status.closed}
    assert dask.config.get("image-ingest", None) == before


def test_a_client_that_fails_to_close_closes_its_cluster(monkeypatch):
    client = dii.start_cluster(1, gpu=False, processes=False, dashboard_address=None)
    cluster, close = client.cluster, Client.close

    def late(self, *args, **kwargs):
        close(self)
        raise TimeoutError("a scheduler that does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(Client, "close", late)
        with pytest.raises(TimeoutError):
            client.close()
    assert cluster.status == Status.closed
    assert dask.config.get("image-ingest.decode-threads", None) is None
