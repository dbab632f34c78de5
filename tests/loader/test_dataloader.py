"""``iter_batches`` and ``dataloader`` in DataLoader workers and ranks: each image once."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import dask
import pytest
from small_frames import lazy_frame, small_frame
from topologies import fake_torch

import dask_image_ingest as dii
from dask_image_ingest.loader import position
from dask_image_ingest.loader.position import parse_shard

WHY = "pip install torch==2.13.0"


@pytest.fixture
def ddf():
    numbers = iter(range(100))
    parts = [[next(numbers) for _ in range(size)] for size in (5, 3, 0, 8, 1, 4, 2)]
    return lazy_frame([small_frame(rows) for rows in parts])


def keys(batches):
    return [int(key) for batch in batches for key in batch["key"]]


def two_workers(context="fork"):
    return {"num_workers": 2, "multiprocessing_context": context}


class TestShare:
    """Which share is found, with no torch installed."""

    @pytest.mark.parametrize(
        ("worker", "group", "numpy", "torch"),
        [
            (None, None, (0, 1, 0, 1), (0, 1, 0, 1)),
            ((1, 4), None, (0, 1, 1, 4), (0, 1, 1, 4)),
            (None, (2, 3), (0, 1, 0, 1), (2, 3, 0, 1)),
            ((1, 4), (2, 3), (0, 1, 1, 4), (2, 3, 1, 4)),
        ],
    )
    def test_workers_share_always_and_ranks_share_tensors(
        self, monkeypatch, worker, group, numpy, torch
    ):
        fake_torch(monkeypatch, worker, group)
        assert parse_shard("auto", "numpy") == numpy
        assert parse_shard("auto", "torch") == torch
        assert parse_shard(None, "torch") == (0, 1, 0, 1)
        assert parse_shard((1, 2), "torch") == (1, 2, 0, 1)

    def test_without_torch_there_is_one_share(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        assert parse_shard("auto", "torch") == (0, 1, 0, 1)

    def test_a_spawned_worker_has_its_rank_from_torchrun(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        fake_torch(monkeypatch, worker=(0, 3))
        assert parse_shard("auto", "torch") == (1, 2, 0, 3)
        # A fork has the group of its process, if there is one.
        with monkeypatch.context() as patch:
            patch.setattr(position, "_PROCESS", -1)
            assert parse_shard("auto", "torch") == (0, 1, 0, 3)
        # A process that has not joined its group yet may do something else first.
        fake_torch(monkeypatch)
        assert parse_shard("auto", "torch") == (0, 1, 0, 1)

    def test_a_rank_that_is_none_is_refused_in_a_spawned_worker(self, monkeypatch):
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "2")
        fake_torch(monkeypatch, worker=(0, 3))
        with pytest.raises(dii.ArgumentError, match=r"shard=\(2, 2\)"):
            parse_shard("auto", "torch")

    def test_what_is_no_share_is_refused(self, ddf):
        for shard in [(2, 2), (-1, 2), (0, 0), 1, (0,), (0, 1, 2), "all", (0.0, 1), (None, 2)]:
            with pytest.raises(dii.ArgumentError, match="shard="):
                ddf.images.iter_batches(2, shard=shard)

    def test_rows_of_a_frame_in_memory_are_shared(self, ddf):
        frame = ddf.compute()
        shares = [
            [keys([batch]) for batch in frame.images.iter_batches(4, shard=(rank, 3))]
            for rank in range(3)
        ]
        assert [len(share) for share in shares] == [2, 2, 2]
        assert [key for share in shares for key in share[0]] == list(range(12))
        assert [key for share in shares for key in share[1]] == list(range(12, 23))


def test_a_package_that_is_missing_is_named(ddf, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dask_image_ingest.loader.dataloader", raising=False)
    with pytest.raises(ImportError, match="dataloader needs torch"):
        ddf.images.dataloader(4)


# distributed warns where a process forks whose threads run.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.torch
class TestDataLoader:
    """With torch itself."""

    @pytest.fixture
    def data(self):
        return pytest.importorskip("torch.utils.data", reason=WHY)

    # A worker that is spawned imports torch and dask: once is enough.
    @pytest.mark.parametrize(
        ("context", "shuffle"),
        [("fork", None), ("fork", 1), pytest.param("spawn", 1, marks=pytest.mark.slow)],
    )
    def test_each_image_comes_once(self, ddf, data, context, shuffle):
        loader = ddf.images.dataloader(3, shuffle=shuffle, **two_workers(context))
        batches = list(loader)
        assert [len(batch["key"]) for batch in batches] == [3] * 7 + [2]
        assert Counter(keys(batches)) == Counter(range(23))

    def test_without_workers_it_is_iter_batches(self, ddf, data):
        # A timeout, which is for workers, may stay where there are none.
        loader = ddf.images.dataloader(3, shuffle=2, num_workers=0, timeout=60)
        first = keys(loader)
        assert first == keys(ddf.images.iter_batches(3, shuffle=2))
        loader.set_epoch(0)
        assert keys(loader) == first
        loader.dataset.set_epoch(1)
        assert keys(loader) == keys(ddf.images.iter_batches(3, shuffle=2, epoch=1)) != first

    def test_a_loader_that_is_made_for_it_gives_whole_batches(self, shards):
        torch = pytest.importorskip("torch", reason=WHY)
        ddf = dii.read_webdataset_images(shards, size=(16, 24), backend="pandas")
        for options in ({}, {"num_workers": 2, "persistent_workers": True}):
            loader = ddf.images.dataloader(
                5, columns=["cls"], shuffle=3, normalize=(0.5, 0.5), **options
            )
            assert (loader.batch_size, loader.num_workers) == (None, options.get("num_workers", 0))
            for epoch in range(2):
                loader.dataset.set_epoch(epoch)
                batches = list(loader)
                assert {batch["image"].shape[1:] for batch in batches} == {(3, 16, 24)}
                assert {len(batch["image"]) for batch in batches} <= {1, 2, 3, 4, 5}
                assert sum(len(batch["cls"]) for batch in batches) == 24
                assert all(isinstance(batch["cls"], torch.Tensor) for batch in batches)

    def test_a_worker_that_dies_is_an_error_and_not_waited_for(self, ddf, data):
        def die(rows):
            os._exit(9)

        loader = ddf.images.dataloader(2, collate_fn=die, **two_workers())
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(loader)

    def test_images_of_rows_are_collated_in_the_workers(self, ddf, data):
        loader = ddf.images.dataloader(
            3, collate_fn=lambda rows: [int(row["key"]) for row in rows], **two_workers()
        )
        assert list(loader) == [keys([batch]) for batch in ddf.images.iter_batches(3)]

    @pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
    def test_workers_that_persist_hear_of_the_epoch(self, ddf, data, context):
        options = {"persistent_workers": True, **two_workers(context)}
        loader = ddf.images.dataloader(2, shuffle=5, **options)
        for epoch in (0, 0, 1, 7):
            loader.dataset.set_epoch(epoch)
            got = [keys([batch]) for batch in loader]
            told = ddf.images.iter_batches(2, shuffle=5, epoch=epoch)
            assert got == [keys([batch]) for batch in told]

    def test_its_repr_tells_the_batches_and_the_epoch(self, ddf, data):
        dataset = ddf.images.dataloader(2, shuffle=5).dataset
        dataset.set_epoch(3)
        assert repr(dataset).startswith("<torch dataset of <batches of 2 rows; epoch 3; shuffle=5")

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
    def test_a_copy_has_an_epoch_of_its_own(self, ddf, data, copied):
        loader = ddf.images.dataloader(2, shuffle=5, **two_workers())
        loader.dataset.set_epoch(2)
        other = copied(loader.dataset)
        persistent = data.DataLoader(
            other, batch_size=None, persistent_workers=True, **two_workers()
        )
        first = keys(persistent)
        assert first == keys(loader)
        other.set_epoch(3)
        loader.dataset.set_epoch(2)
        second = keys(persistent)
        assert second != first == keys(loader)
        loader.dataset.set_epoch(3)
        assert second == keys(loader)

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
    def test_a_dataset_of_the_users_own_has_each_image_once_too(self, ddf, data):
        class Own(data.IterableDataset):
            def __iter__(self):
                yield from ddf.images.iter_batches(3)

        loader = data.DataLoader(Own(), batch_size=None, num_workers=2)
        assert Counter(keys(loader)) == Counter(range(23))

    @pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
    def test_shards_are_decoded_in_workers_of_a_process_that_has_decoded(
        self, shards, data, context
    ):
        ddf = dii.read_webdataset_images(shards, size=16, backend="pandas")
        want = ddf.compute()["__key__"].tolist()
        loader = ddf.images.dataloader(5, columns=["__key__"], **two_workers(context))
        got = [key for batch in loader for key in batch["__key__"]]
        assert sorted(got) == sorted(want)

    def test_a_client_of_a_cluster_does_not_hold_up_the_workers(self, ddf, data, client):
        with dask.config.set(scheduler=None):
            loader = ddf.images.dataloader(3, num_workers=2, timeout=280)
            assert sorted(keys(loader)) == list(range(23))
            loader = ddf.persist().images.dataloader(3, num_workers=1, timeout=280)
            with pytest.raises(dii.ArgumentError, match="before persist"):
                list(loader)

    @pytest.mark.filterwarnings("ignore")
    def test_a_stateful_loader_goes_on_where_it_stopped(self, ddf):
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata")

        def loader():
            dataset = ddf.images.dataloader(2, shuffle=5).dataset
            return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=2)

        whole = [keys([batch]) for batch in loader()]
        for done in range(len(whole)):
            first, second = loader(), loader()
            batches = iter(first)
            for _ in range(done):
                next(batches)
            second.load_state_dict(first.state_dict())
            assert [keys([batch]) for batch in second] == whole[done:]

    @pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
    def test_ranks_of_a_process_group_share_too(self, context, tmp_path):
        pytest.importorskip("torch", reason=WHY)
        root = Path(__file__).parents[2]
        script = root / "tests" / "support" / "torch_rank.py"
        ranks = [
            subprocess.Popen(
                [sys.executable, script, tmp_path / "group", str(rank), context],
                env=os.environ | {"PYTHONPATH": f"{script.parent}:{root}"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            shares = [rank.communicate(timeout=250)[0].split() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert all(shares)
        assert Counter(int(key) for share in shares for key in share) == Counter(range(23))
