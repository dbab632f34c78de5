"""What a cluster says: who has joined, and nothing that a user can do nothing about."""

import logging
from types import SimpleNamespace

import pytest
from distributed import Status
from processes import until

import dask_image_ingest as dii
from dask_image_ingest.cluster import messages
from dask_image_ingest.cluster.prepare import PrepareWorker


@pytest.fixture
def filters():
    """Loggers of dask as they were, after the test."""
    names = ("distributed.shuffle._scheduler_plugin", "distributed.nanny", "distributed.worker")
    before = {name: logging.getLogger(name).filters.copy() for name in names}
    for name in names:
        logging.getLogger(name).filters.clear()
    yield
    for name, kept in before.items():
        logging.getLogger(name).filters[:] = kept


def test_a_start_that_takes_long_says_how_many_workers_have_joined(monkeypatch, capfd):
    monkeypatch.setattr(messages, "_PATIENCE", 0.01)
    with messages.reporting_workers(3) as plugin:
        plugin.add_worker(None, "tcp://127.0.0.1:1")
        until(lambda: "1 of 3 workers have joined" in capfd.readouterr().err)
    capfd.readouterr()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_the_scheduler_counts_workers_beside_the_plugins_of_the_user(forked):
    mine = messages._JoinCounter()
    mine.name = "mine"
    with dii.start_cluster(
        1, gpu=False, dashboard_address=None, scheduler_kwargs={"plugins": [mine]}
    ) as client:
        ours = client.cluster.scheduler.plugins["image-ingest-joined"]
        assert ours.joined == mine.joined == 1


@pytest.mark.slow
def test_a_shuffle_has_nothing_to_say(shards, filters, forked, caplog):
    with dii.start_cluster(2, gpu=False, dashboard_address=None):
        ddf = dii.read_webdataset_images(shards, backend="pandas", decode=False)
        assert len(ddf.shuffle("__key__").compute()) == 24
    said = [record for record in caplog.records if record.name.startswith("distributed.shuffle")]
    assert said == []


def test_a_worker_that_ends_leaves_out_its_heartbeat_and_nothing_else(filters, caplog):
    logger = logging.getLogger("distributed.worker")
    plugin = PrepareWorker({})
    plugin.teardown(SimpleNamespace(status=Status.running))
    logger.error("Failed to communicate with scheduler during heartbeat.")
    plugin.teardown(SimpleNamespace(status=Status.closing))
    logger.error("Failed to communicate with scheduler during heartbeat.")
    logger.error("another error")
    assert [record.message for record in caplog.records] == [
        "Failed to communicate with scheduler during heartbeat.",
        "another error",
    ]
