"""A cluster whose workers decode side by side, and that goes when its client goes."""

import copy
import os
import socket
import sys
import warnings

import dask
import pandas as pd
import psutil
import pyarrow as pa
import pytest
from distributed import Client
from processes import SECONDS, until

import dask_image_ingest as dii
from dask_image_ingest.decode.dali import decode_threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def as_users_start_it():
    """A cluster of one worker, which reads its configuration as it starts."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
        client = dii.start_cluster(1, gpu=False, dashboard_address=None)
    with client:
        yield client


@pytest.mark.usefixtures("spawned")
def test_workers_and_their_decoding_threads_fit_the_cores_and_go_with_the_client():
    cores = len(os.sched_getaffinity(0))
    with dii.start_cluster(gpu=False, dashboard_address=None) as client:
        workers = client.nthreads()
        threads = client.run(decode_threads)
        processes = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        assert 1 <= sum(threads.values()) <= max(cores, len(workers))
        assert all(client.run(_knows_the_image_dtype).values())
        assert set(workers.values()) == {1}
    assert client.status == "closed"
    gone, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert not alive
    assert len(gone) == len(processes)


def _knows_the_image_dtype():
    import pandas as pd

    return str(pd.api.types.pandas_dtype("image")) == "image"


def test_every_number_is_an_argument(shards):
    with dii.start_cluster(
        1, gpu=False, decode_threads=3, memory_limit="2 GiB", dashboard_address=None
    ) as client:
        assert list(client.run(decode_threads).values()) == [3]
        assert list(client.run(memory_limit).values()) == [2 * 2**30]
        ddf = dii.read_webdataset_images(shards, backend="pandas").persist()
        assert len(ddf) == 24


def memory_limit(dask_worker):
    return dask_worker.memory_manager.memory_limit


def test_pixels_come_from_the_workers_themselves(shards):
    with dii.start_cluster(1, gpu=False, dashboard_address=None) as client:
        asked = []
        handlers = client.cluster.scheduler.handlers
        gather = handlers["gather"]
        handlers["gather"] = lambda **what: asked.append(what) or gather(**what)
        assert dii.read_webdataset_images(shards, size=16).compute().image.notna().all()
        assert not asked
        with Client(client.cluster) as other:  # as Dask has it
            assert other.submit(sum, [1, 2]).result() == 3
        assert len(asked) == 1


def is_warm() -> bool:
    """Whether this process has decoded something."""
    warm = sys.modules.get("dask_image_ingest.cluster.prepare")
    return warm is not None and "nvidia.dali" in sys.modules and not warm._warming[0].is_alive()


def test_dali_is_there_before_the_first_task(as_users_start_it):
    pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")
    until(lambda: all(as_users_start_it.run(is_warm).values()))


def test_pixels_of_a_partition_are_not_copied_together(as_users_start_it, monkeypatch):
    """As Dask does with what is sent in shards."""
    copied = []
    serialize = sys.modules["distributed.protocol.serialize"]
    copy = serialize.host_array_from_buffers
    monkeypatch.setattr(
        serialize, "host_array_from_buffers", lambda parts: copied.append(parts) or copy(parts)
    )
    frame = as_users_start_it.submit(large_frame).result()
    assert [len(image) for image in frame["image"]] == [50 << 20] * 2
    assert not copied


def large_frame():
    """Small buffers before one of 100 MiB."""
    images = pd.array([bytes(50 << 20)] * 2, pd.ArrowDtype(pa.large_binary()))
    return pd.DataFrame({"number": [1, 2], "image": images})


def test_workers_decode_with_their_threads_whatever_else_is_configured():
    with (
        dask.config.set({"image-ingest.remote.retry-limit": "9s"}),
        dii.start_cluster(1, gpu=False, decode_threads=3, dashboard_address=None) as client,
    ):
        assert list(client.run(decode_threads).values()) == [3]
        (limit,) = client.run(dask.config.get, "image-ingest.remote.retry-limit").values()
        assert limit == "9s"


def test_workers_without_processes_decode_in_this_one(shards):
    before, configured = decode_threads(), copy.deepcopy(dask.config.config)
    with dii.start_cluster(
        2, gpu=False, decode_threads=before + 1, processes=False, dashboard_address=None
    ) as client:
        assert set(client.run(os.getpid).values()) == {os.getpid()}
        assert list(client.run(decode_threads).values()) == [before + 1] * 2
        assert dii.read_webdataset_images(shards, size=16).compute()["error"].isna().all()
    assert decode_threads() == before
    client.close()
    assert decode_threads() == before
    # Workers of later clusters would take what is left over for their own configuration.
    assert dask.config.config == configured


def test_variables_of_processes_that_are_not_there_are_refused():
    with pytest.raises(dii.ArgumentError, match="processes=False"):
        dii.start_cluster(1, gpu=False, processes=False, env={"A": "1"})


def test_clocks_of_dask_are_slowed_unless_somebody_has_set_them():
    tick, profile = "distributed.admin.tick.interval", "distributed.worker.profile.interval"
    assert (dask.config.get(tick), dask.config.get(profile)) == ("20ms", "10ms")
    with (
        dask.config.set({tick: "70ms"}),
        dii.start_cluster(1, gpu=False, dashboard_address=None) as client,
    ):
        (of_worker,) = client.run(
            lambda: [dask.config.get(tick), dask.config.get(profile)]
        ).values()
    assert of_worker == ["70ms", "50ms"]
    assert dask.config.get(profile) == "10ms"


def test_a_gpu_cluster_without_dask_cuda_names_the_extra():
    pytest.importorskip("distributed")
    try:
        import dask_cuda  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="cuda12"):
            dii.start_cluster(gpu=True)
    else:
        pytest.skip("dask-cuda is installed here")


@pytest.fixture(scope="module")
def client():
    with dii.start_cluster(1, gpu=False, dashboard_address=None) as client:
        yield client


def test_a_client_of_a_whole_module_runs_its_tests_tasks(client):
    """What tests of memory and of a GPU's workers rest on."""
    assert dask.delayed(os.getpid)().compute() != os.getpid()


@pytest.mark.parametrize(
    "arguments",
    [
        {"n_workers": 0},
        {"n_workers": -1},
        {"n_workers": 1.5},
        {"n_workers": "two"},
        {"n_workers": True},
        {"decode_threads": 0},
        {"n_worker": 2},
    ],
    ids=str,
)
def test_nonsense_is_refused_before_anything_starts(arguments, monkeypatch):
    started = []
    monkeypatch.setattr("dask_image_ingest.cluster.local.LocalCluster", started.append)
    with pytest.raises(dii.ArgumentError, match=next(iter(arguments))):
        dii.start_cluster(**{"gpu": False} | arguments)
    assert not started


def test_a_port_that_is_taken_is_no_matter_for_a_warning():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            warnings.catch_warnings(action="error"),
            dii.start_cluster(
                1, gpu=False, processes=False, dashboard_address=f"127.0.0.1:{port}"
            ) as client,
        ):
            assert f":{port}/" not in client.dashboard_link
