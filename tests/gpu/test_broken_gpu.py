"""A kernel that writes where it may not costs its worker, and no later task."""

import os

import pytest

import dask_image_ingest as dii

pytestmark = pytest.mark.card

SOURCE = 'extern "C" __global__ void wild(int* where) { where[1ll << 40] = 1; }'


def break_gpu_once(path):
    """An illegal access in the first process that comes here; the number of the next."""
    import cupy

    if not path.exists():
        path.touch()
        cupy.RawKernel(SOURCE, "wild")((1,), (1,), (cupy.zeros(1, cupy.int32),))
        cupy.cuda.Device().synchronize()
    assert int(cupy.arange(3).sum()) == 3
    return os.getpid()


def test_a_task_that_breaks_its_gpu_runs_again_in_another_process(tmp_path):
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as client:
        (first,) = client.run(os.getpid).values()
        assert client.submit(break_gpu_once, tmp_path / "broken").result(timeout=120) != first
