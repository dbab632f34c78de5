"""Batches fit the GPU that decodes them, however many threads there are."""

import sys
from types import SimpleNamespace

import dask
import pytest
from synthetic import encode, photograph

from dask_image_ingest.decode import planner, resources
from dask_image_ingest.decode.formats.header import Header
from dask_image_ingest.decode.options import Decoding


@pytest.mark.parametrize("threads", [1, 16])
def test_large_images_do_not_stretch_a_batch_beyond_what_fits(monkeypatch, threads):
    most = 100 * 10**6
    monkeypatch.setattr(planner, "current_device", lambda: 3)
    monkeypatch.setattr(planner, "batch_bytes", {3: most}.get)
    content = encode(photograph(40, 50))
    headers = [Header("jpeg", 3000, 4000, 3, None, False)] * 40  # 36 MB each
    with dask.config.set({"image-ingest.decode-threads": threads}):
        batches = list(planner.Schedule(headers, lambda row: content, Decoding(device="gpu")))
    assert sum(len(batch.rows) for batch in batches) == 40
    assert {len(batch.rows) for batch in batches} == {2}


def test_an_image_that_is_larger_than_a_batch_is_one(monkeypatch):
    monkeypatch.setattr(planner, "current_device", lambda: 0)
    monkeypatch.setattr(planner, "batch_bytes", lambda device: 10**6)
    content = encode(photograph(40, 50))
    headers = [Header("jpeg", 3000, 4000, 3, None, False)] * 3
    batches = list(planner.Schedule(headers, lambda row: content, Decoding(device="gpu")))
    assert [len(batch.rows) for batch in batches] == [1, 1, 1]


@pytest.mark.parametrize(
    ("gigabytes", "least"), [(6, 0.2), (16, 0.5), (24, 0.9), (80, 1.0), (141, 1.0)]
)
def test_three_batches_fit_what_the_pool_of_frames_leaves(monkeypatch, gigabytes, least):
    total = gigabytes * 2**30
    card = SimpleNamespace(
        runtime=SimpleNamespace(memGetInfo=lambda: (total // 2, total)),
        Device=_Device,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=card))
    resources.batch_bytes.cache_clear()
    size = resources.batch_bytes(0)
    resources.batch_bytes.cache_clear()
    assert least * 2**30 <= size <= 2**30
    # start_cluster leaves DALI three tenths; half of that is for its tables and the context.
    assert 3 * size <= 0.15 * total


class _Device:
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None
