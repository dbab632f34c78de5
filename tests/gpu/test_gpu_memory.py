"""What frames of pixels weigh on a GPU: as dask sees them, as they are sent, at their peak."""

import dask
import gpu_probes
import numpy as np
import pytest
from contract import on_host, to_arrow
from distributed import wait
from processes import printed
from synthetic import write_shard, write_shards

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def client():
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as client:
        yield client


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 4, 100)


def pixels_in(ddf):
    sizes = ddf.map_partitions(gpu_probes.count_pixels, meta=gpu_probes.COUNTED)
    return int(sizes["size"].sum().compute())


def known_bytes(dask_scheduler):
    return sum(max(task.nbytes, 0) for task in dask_scheduler.tasks.values())


def test_the_scheduler_sees_what_persisted_partitions_weigh(client, shards):
    ddf = dii.read_webdataset_images(shards, backend="cudf").persist()
    wait(ddf)
    seen = client.run_on_scheduler(known_bytes)
    pixels = pixels_in(ddf)
    print(f"{pixels:,} bytes of pixels, {seen:,} seen by the scheduler")
    assert pixels <= seen < 1.2 * pixels


def test_a_persisted_head_is_sent_without_its_partition(client, shards):
    ddf = dii.read_webdataset_images(shards, backend="cudf").persist()
    head = ddf.head(5, compute=False).persist()
    sent = head.map_partitions(gpu_probes.sent_bytes, meta=gpu_probes.SENT).compute()
    weight = pixels_in(head)
    print(f"{weight:,} bytes of pixels in 5 rows, sent as {sent['bytes'].tolist()}")
    assert weight <= sent["bytes"].iloc[0] < 1.2 * weight + 10_000


@pytest.mark.parametrize("method", ["tasks", "p2p"])
def test_a_shuffle_loses_no_pixel(client, shards, method):
    ddf = dii.read_webdataset_images(shards, backend="cudf", size=32)
    before = pixels_in(ddf)
    shuffled = ddf.shuffle("__key__", shuffle_method=method)
    assert pixels_in(shuffled) == before
    assert len(shuffled) == 400


@pytest.mark.parametrize("method", ["tasks", "p2p"])
@pytest.mark.parametrize("by", ["__key__", "error"])
def test_pixels_in_memory_are_shuffled_beside_rows_without(client, shards, tmp_path, method, by):
    """By their error, the rows without a picture have a partition for themselves."""
    bad = write_shard(tmp_path / "bad.tar", {f"bad-{n:02}.jpg": b"no picture" for n in range(20)})
    ddf = dii.read_webdataset_images([*shards, bad], backend="cudf", size=32).persist()
    wait(ddf)
    before = pixels_in(ddf)
    shuffled = ddf.shuffle(by, shuffle_method=method).persist()
    assert len(shuffled) == 420
    assert pixels_in(shuffled) == before
    frame = shuffled[["image"]].compute()
    assert sum(array is None for array in frame.images.arrays()) == 20


@pytest.mark.card
def test_a_late_decode_takes_the_memory_of_its_pixels_and_little_more(client, shards):
    found = client.submit(gpu_probes.peak_of_a_late_decode, shards[0], pure=False).result()
    print(found)
    assert found["peak"] < 1.3 * found["pixels"]


def test_results_go_to_pandas_and_back_as_they_are(client, shards):
    ddf = dii.read_webdataset_images(shards[:1], backend="cudf")
    on_gpu = ddf.compute()
    as_pandas = ddf.to_backend("pandas").compute()
    expected = dii.read_webdataset_images(shards[:1], backend="pandas")
    assert as_pandas["image"].dtype == expected._meta["image"].dtype
    assert as_pandas.dtypes.to_dict() == ddf.to_backend("pandas")._meta.dtypes.to_dict()
    again = ddf.to_backend("pandas").to_backend("cudf").compute()
    assert to_arrow(again[["__key__", "image"]]).equals(to_arrow(on_gpu[["__key__", "image"]]))
    for one, two in zip(as_pandas.images.arrays(), on_gpu.images.arrays(), strict=True):
        np.testing.assert_array_equal(one, on_host(two))


@pytest.mark.card
def test_more_than_a_column_holds_is_an_error_that_says_what_to_do(client, tmp_path):
    large = write_shards(tmp_path, 8, 64, size=(1200, 1200), distinct=2)
    ddf = dii.read_webdataset_images(large, backend="cudf")
    with pytest.raises(MemoryError, match="to_parquet"):
        ddf.compute()
    assert len(ddf) == 512


READ_FIRST = """
import json
import dask_image_ingest as dii

if __name__ == "__main__":
    ddf = dii.read_webdataset_images({paths!r}, backend="cudf")
    wide = ddf[ddf.width >= 312]  # asks cuDF, and so decides on spilling in this process
    with dii.start_cluster(1, gpu=True, rmm_pool_size=0.2, dashboard_address=None) as client:
        frame = wide.partitions[0].compute()
        arrays = [array for array in frame.images.arrays() if array is not None]
        print(json.dumps([len(frame), len(arrays)]))
"""


@pytest.mark.card
def test_what_was_read_before_the_cluster_was_started_comes_back(shards):
    rows, images = printed(READ_FIRST.format(paths=[str(path) for path in shards]))
    assert rows == images > 0


@pytest.mark.card
def test_images_are_decoded_on_the_gpu_that_is_current(shards):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        frame = gpu_probes.compute(dii.read_webdataset_images(shards[0], backend="cudf"))
        assert {array.device.id for array in frame.images.arrays()} == {1}
        ddf = dii.read_webdataset_images(shards[0], backend="cudf", size=32)
        with dask.config.set(scheduler="synchronous"):
            (batch,) = ddf.images.iter_batches(100, format="cupy")
        assert batch["image"].device.id == 1
