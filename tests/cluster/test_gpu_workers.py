"""How many workers a cluster on GPUs has, with dask-cuda as far as it is asked."""

import sys
import threading
from types import SimpleNamespace

import played_dali
import pytest

import dask_image_ingest as dii
from dask_image_ingest.cluster import local, prepare
from dask_image_ingest.decode import planner


class Started(Exception):
    """That dask-cuda was asked for a cluster."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with two GPUs."""

    def start(**settings):
        raise Started(settings["n_workers"])

    monkeypatch.setitem(sys.modules, "dask_cuda", SimpleNamespace(LocalCUDACluster=start))
    monkeypatch.setattr(local, "gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("n_workers", "devices"),
    [(3, None), (3, "0,1"), (2, "0"), (2, [1]), (2, "1,1"), (2, ["GPU-a", "GPU-a"])],
)
def test_more_workers_than_gpus_are_refused_before_anything_starts(n_workers, devices):
    threads = threading.active_count()
    with pytest.raises(dii.ArgumentError, match=f"n_workers={n_workers} .*GPUs"):
        dii.start_cluster(n_workers, gpu=True, CUDA_VISIBLE_DEVICES=devices)
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("n_workers", "devices", "expected"),
    [
        (None, None, 2),
        (2, None, 2),
        (None, "1", 1),
        (None, [0, 1, 2], 3),
        (1, "0, 1", 1),
        (2, "GPU-a,GPU-b", 2),
    ],
)
def test_there_is_a_worker_for_each_gpu_that_workers_may_have(n_workers, devices, expected):
    with pytest.raises(Started) as started:
        dii.start_cluster(n_workers, gpu=True, CUDA_VISIBLE_DEVICES=devices)
    assert started.value.args == (expected,)


def test_parts_of_one_gpu_have_workers_of_their_own(monkeypatch):
    """CUDA shows a process no more than the first of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    monkeypatch.setattr(local, "gpus", lambda: 1)
    with pytest.raises(Started) as started:
        dii.start_cluster(3, gpu=True)
    assert started.value.args == (3,)
    with pytest.raises(dii.ArgumentError, match="n_workers=4"):
        dii.start_cluster(4, gpu=True)


def test_without_a_gpu_there_is_no_worker_to_start(monkeypatch):
    monkeypatch.setattr(local, "gpus", lambda: 0)
    for devices in (None, ""):
        with pytest.raises(dii.ArgumentError, match="no GPU"):
            dii.start_cluster(gpu=True, CUDA_VISIBLE_DEVICES=devices)


def test_a_pipeline_is_there_before_the_first_task(monkeypatch):
    made = played_dali.play(monkeypatch)
    monkeypatch.setattr(planner, "current_device", lambda: 0)
    planner._decoders.cache_clear()
    prepare.warm_up("gpu")
    prepare.end_warm_up()
    planner._decoders.cache_clear()
    (pipeline,) = made
    assert pipeline.options["device_id"] == 0
    assert [len(batch) for batch in pipeline.fed] == [256, 1]


def test_a_gpu_without_room_for_it_ends_no_worker(monkeypatch):
    played_dali.play(monkeypatch)
    uncaught = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def fails():
        raise RuntimeError("CUDA allocation failed")

    monkeypatch.setattr(planner, "current_device", fails)
    prepare.warm_up("gpu")
    prepare.end_warm_up()
    assert not uncaught
