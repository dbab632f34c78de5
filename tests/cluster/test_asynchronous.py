"""With an asynchronous client a read waits for nothing, and what has to wait is Dask's error."""

import asyncio
import warnings

import dask
import pytest
from distributed import Client

import dask_image_ingest as dii

pytestmark = pytest.mark.slow


def test_a_read_waits_for_no_worker(cluster, shards):
    async def main():
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            with warnings.catch_warnings(action="error"):
                ddf = dii.read_webdataset_images(shards, size=8, backend="pandas")
                frame = await client.compute(ddf)
                again = await client.gather(client.compute(ddf["__key__"].count()))
            return len(frame), again

    with dask.config.set(scheduler=None):
        assert asyncio.run(main()) == (24, 24)


def test_what_has_to_wait_is_an_error_of_dask(cluster, shards, tmp_path):
    out = tmp_path / "out"

    async def main():
        async with Client(cluster.scheduler_address, asynchronous=True):
            ddf = dii.read_webdataset_images(shards, backend="pandas")
            for wait in (
                lambda: next(iter(ddf.images.iter_batches(4))),
                lambda: dii.to_webdataset(ddf, f"{out}/{{shard:03d}}.tar"),
                lambda: dii.write_index(shards, folder=out),
                lambda: dii.checkpoint(ddf, out),
                lambda: dii.gallery(ddf, tmp_path / "gallery.html"),
                lambda: dii.progress().__enter__(),
                ddf.compute,
            ):
                with pytest.raises(RuntimeError, match="asynchronous"):
                    wait()
            # A task on a thread asks no client whose event loop waits for it.
            assert len(ddf.compute(scheduler="threads")) == 24

    with dask.config.set(scheduler=None):
        asyncio.run(main())


def test_a_cluster_can_be_started_inside_a_running_event_loop(shards):
    async def main():
        with pytest.raises(dii.ArgumentError, match="asynchronous=True"):
            dii.start_cluster(1, gpu=False, asynchronous=True)
        with dii.start_cluster(1, gpu=False, processes=False, dashboard_address=None):
            return len(dii.read_webdataset_images(shards, size=8, backend="pandas").compute())

    with dask.config.set(scheduler=None):
        assert asyncio.run(main()) == 24
