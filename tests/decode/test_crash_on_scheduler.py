"""Workers that share nothing but their scheduler find the image that kills them."""

import dask
import pytest
from corpus import images
from crasher import IN_DALI, plant
from distributed import Client
from hand_started import HandStarted
from handmade import insert_after_soi, jpeg_segment
from photo_shards import write_tar

import dask_image_ingest as dii

pytestmark = [pytest.mark.slow, pytest.mark.newest]

# More than Dask allows to die of a task.
WORKERS = [5, pytest.param(8, marks=pytest.mark.nightly)]

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards of six images, of which one kills; a fifth one with the same image."""
    folder = tmp_path_factory.mktemp("crashing")
    good = images()["jpeg-420"]
    bad = insert_after_soi(good, jpeg_segment(0xFE, IN_DALI))
    named = {f"{n:02}.jpg": bad if n == 15 else good for n in range(24)}
    parts = [dict([*named.items()][start : start + 6]) for start in range(0, 24, 6)]
    parts.append({"24.jpg": bad, "25.jpg": good})
    return [write_tar(folder / f"{n}.tar", members) for n, members in enumerate(parts)]


@pytest.fixture
def cluster(tmp_path):
    """Processes with the bug, each with a journal of its own among its temporary files."""
    plant(tmp_path / "bug")
    with HandStarted(tmp_path / "cluster") as started, dask.config.set(scheduler=None):
        yield started


def died(client: Client) -> int:
    def count(dask_scheduler) -> int:
        return sum(
            event["action"] == "remove-worker" and not event["expected"]
            for _, event in dask_scheduler.get_events("all")
        )

    return client.run_on_scheduler(count)


@pytest.mark.parametrize("count", WORKERS)
@pytest.mark.parametrize("nanny", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_one_image_costs_one_row_and_one_worker(nanny, count, cluster, shards, tmp_path):
    bug = tmp_path / "bug" / "sitecustomize.py"
    for _ in range(count):
        cluster.worker("--preload", str(bug), "--nanny" if nanny else "--no-nanny")
    with cluster.client(count) as client:
        frame = dii.read_webdataset_images(shards[:4], backend="pandas").compute()
        errors = frame.set_index("__key__")["error"].dropna()
        assert sorted(frame["__key__"]) == [f"{n:02}" for n in range(24)]
        assert errors.to_dict() == {
            "15": "crashed-decoder: decoding it kills the process (SIGSEGV)"
        }
        assert died(client) == 1
        # The image is known from now on, wherever it comes from.
        again = dii.read_webdataset_images(shards[4], backend="pandas").compute()
        assert again["error"].notna().tolist() == [True, False]
        assert died(client) == 1
        # Nothing but the scheduler's memory tells of it.
        assert not [*cluster.folder.glob("*/tmp/dask-image-ingest-*")]
