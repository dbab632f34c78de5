"""Threads of a process work on the GPU that the process works on."""

import threading

import cupy
import pytest
from distributed import Client, LocalCluster
from distributed.utils import offload
from synthetic import write_shards

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import rows
from dask_image_ingest.decode.dali import current_device
from dask_image_ingest.frames import get_backend
from dask_image_ingest.frames.cudf import backend as backend_module
from dask_image_ingest.frames.cudf.backend import CudfBackend
from dask_image_ingest.loader import source
from dask_image_ingest.loader.source import LazySource


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's current device, which is a thread's own, and the first one in a new thread."""
    own = threading.local()
    runtime = cupy.cuda.runtime
    monkeypatch.setattr(runtime, "getDevice", lambda: getattr(own, "device", 0))
    monkeypatch.setattr(runtime, "setDevice", lambda device: setattr(own, "device", device))
    monkeypatch.setattr(backend_module, "gpus", lambda: 4)
    return runtime


def test_batches_are_decoded_on_the_gpu_of_the_thread_that_asks_for_them(
    runtime, tmp_path, monkeypatch
):
    paths = write_shards(tmp_path, 3, 4)
    ddf = dii.read_webdataset_images(paths, backend="pandas", size=8)
    devices = []
    decode = rows.decode

    def decode_and_tell(*args, **options):
        devices.append(current_device())
        return decode(*args, **options)

    monkeypatch.setattr(rows, "decode", decode_and_tell)
    monkeypatch.setattr(source, "backend_of", lambda meta: get_backend("cudf"))
    runtime.setDevice(3)
    assert len([*ddf.images.iter_batches(4)]) == 3
    assert devices == [3] * 3


def test_frames_arrive_on_the_gpu_of_the_thread_that_asks_for_them(runtime, tmp_path, monkeypatch):
    """Dask receives them in threads of its own, which begin on the first GPU."""
    monkeypatch.setattr(source, "backend_of", lambda meta: get_backend("cudf"))
    ddf = dii.read_webdataset_images(write_shards(tmp_path, 1, 4), backend="pandas", size=8)
    with (
        LocalCluster(1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        runtime.setDevice(3)
        with LazySource(ddf, "image") as opened:
            # No more of them than a GPU has room for, beside a model.
            assert opened.default_prefetch() == 2
            assert client.sync(devices_of_dask) == (3, 3)


async def devices_of_dask():
    """The devices of its threads that deserialize."""
    return current_device(), await offload(current_device)


@pytest.mark.parametrize("name", ["CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "CUDF_PER_THREAD_STREAM"])
def test_a_default_stream_for_each_thread_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    CudfBackend()
    monkeypatch.setenv(name, "1")
    with pytest.raises(dii.ArgumentError, match=f"{name}.*pandas"):
        CudfBackend()
