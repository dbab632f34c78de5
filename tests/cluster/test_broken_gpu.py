"""A worker whose GPU no longer works is replaced by one whose GPU does."""

import os
import sys
import threading
import types

import pytest
from distributed import Client, LocalCluster

from dask_image_ingest.cluster import prepare
from dask_image_ingest.cluster.prepare import LeaveBrokenGpu, broken_gpu


class CudaError(RuntimeError):
    """CuPy's error, which has a number."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


def break_gpu(status):
    """Have CuPy, which is not there, fail in this process from now on; gives its number."""

    def synchronize():
        raise CudaError(status, "cudaErrorIllegalAddress: an illegal memory access")

    runtime = types.SimpleNamespace(deviceSynchronize=synchronize, CUDARuntimeError=CudaError)
    sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    raise CudaError(status, "CUDA error: an illegal memory access was encountered")


def break_gpu_once(path, status):
    """Break it in the first process that comes here."""
    if not path.exists():
        path.touch()
        break_gpu(status)
    return os.getpid()


@pytest.mark.parametrize("status", [700, 719, 2, 100])
def test_errors_that_last_are_known_by_their_number(monkeypatch, status):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert broken_gpu() is None
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaError):
        break_gpu(status)
    assert (broken_gpu() is not None) == (status >= 700)


def test_a_busy_gpu_does_not_hold_up_the_event_loop_of_its_worker(monkeypatch):
    done, asked = threading.Event(), []

    def synchronize():
        asked.append(threading.current_thread())
        assert done.wait(60)

    runtime = types.SimpleNamespace(deviceSynchronize=synchronize, CUDARuntimeError=CudaError)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(prepare, "_ANSWER_TIMEOUT", 0.01)
    task = types.SimpleNamespace(exception_text="CUDA error: out of memory")
    state = types.SimpleNamespace(tasks={"key": task})
    plugin = LeaveBrokenGpu()
    plugin.setup(types.SimpleNamespace(state=state, nanny="tcp://nanny", address="tcp://worker"))
    try:
        for _ in range(3):  # it is asked once
            plugin.transition("key", "executing", "error")
    finally:
        done.set()
    (thread,) = asked
    assert thread.daemon
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.usefixtures("synchronous")
def test_a_task_that_breaks_its_gpu_runs_again_in_another_process(tmp_path, forked):
    import dask_image_ingest as dii

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        dii.prepare_cluster(client)
        (first,) = client.run(os.getpid).values()
        again = client.submit(break_gpu_once, tmp_path / "broken", 700).result(timeout=120)
        assert again != first
        # An error from which a GPU recovers ends nothing.
        with pytest.raises(CudaError):
            client.submit(break_gpu, 2).result(timeout=120)
        assert client.submit(os.getpid).result(timeout=120) == again
