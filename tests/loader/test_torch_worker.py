"""Workers of a ``DataLoader``: each batch arrives whole or as an error; none outlives its job."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import resource
import threading
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.callbacks import Callback
from forked_python import Fork, run_main, run_python
from processes import SECONDS, printed, until
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
dataloader = pytest.importorskip("dask_image_ingest.loader.dataloader")

# distributed warns where a process forks whose threads run.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse :UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

Named = collections.namedtuple("Named", "x y")


@dataclasses.dataclass
class Record:
    x: object


def kinds():
    grid, shared = torch.arange(12.0).reshape(3, 4), torch.ones(2)
    return [
        {"a": np.arange(3, dtype="uint16"), "b": [np.float32(2), {"c": np.array(["x", "y"])}]},
        (grid, [grid[1:, ::2], grid.T, grid[0, :0], torch.ones(1).expand(100, 100)]),
        Named(torch.tensor(True), "text"),
        Record(grid[:, 1]),
        Record([np.arange(5), grid.to(torch.bfloat16)]),
        collections.UserDict(a=grid),
        collections.deque([torch.tensor(3), shared, shared]),
        grid.to_sparse(),
        grid.to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(n + 1) for n in range(3)]),
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.ones(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.empty(3, device="meta"),
        torch.empty(0),
        None,
        "text",
        range(3),
        [],
    ]


@pytest.fixture
def ddf():
    return lazy_frame([small_frame(range(start, start + 10)) for start in (0, 10)])


def kind_of_row(rows):
    return kinds()[rows[0]["key"] % len(kinds())]


def large(rows):
    return np.full((1000, 1000), 1 + rows[0]["key"], np.uint8)


def told(value):
    """What two equal batches tell alike."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return list(map(told, value.unbind()))
        text = str(value.to_dense() if value.layout != torch.strided else value)
        return value.dtype, value.layout, value.shape, value.requires_grad, text
    if isinstance(value, collections.abc.Mapping):
        return type(value), [(key, told(each)) for key, each in value.items()]
    if isinstance(value, Record):
        return told(value.x)
    if isinstance(value, collections.abc.Sequence) and not isinstance(value, str):
        return type(value), list(map(told, value))
    return repr(value)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_what_collate_fn_returns_arrives_as_without_workers(ddf, context):
    options = {"num_workers": 2, "multiprocessing_context": context, "timeout": SECONDS}
    batches = list(ddf.images.dataloader(1, collate_fn=kind_of_row, **options))
    for batch, kind in zip(batches, kinds(), strict=False):
        assert told(batch) == told(torch.utils.data.default_convert(kind))


def memory_of(tensor):
    """Number and name of the file that a tensor is in, by the kernel's list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, number, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return number, "".join(name)
    raise AssertionError("the tensor is nowhere")


@pytest.mark.parametrize(
    "collate",
    [
        None,
        large,
        lambda rows: {"images": large(rows), "n": len(rows)},
        lambda rows: Record(torch.from_numpy(large(rows))),
        lambda rows: torch.from_numpy(large(rows)).to_sparse(),
    ],
)
def test_no_batch_needs_room_in_dev_shm(ddf, collate):
    batches = list(ddf.images.dataloader(4, collate_fn=collate, num_workers=1, timeout=SECONDS))
    assert len(batches) == 5
    for batch in batches:
        value = batch.x if isinstance(batch, Record) else batch
        value = value.get("images", value.get("image")) if isinstance(value, dict) else value
        assert memory_of(value.values() if value.is_sparse else value)[1].startswith("/memfd:")


def huge(rows):  # than a block that is used again
    return np.full((1500, 1500), rows[0]["key"], np.uint8)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_memory_of_a_batch_is_used_again_but_not_while_it_is_held(ddf, context):
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": context}
    loader = ddf.images.dataloader(1, collate_fn=huge, timeout=SECONDS, **options)
    files, held = [], []
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert int(batch.min()) == int(batch.max()) == number
            files.append(memory_of(batch)[0])
            if number % 3 == 0:
                held.append((number, batch[number:, 5:]))
            batch += 100  # as a training may, in place
    assert len(set(files)) < len(files) / 2
    for number, part in held:
        assert int(part.min()) == int(part.max()) == number + 100


def test_a_batch_is_whole_when_its_worker_was_killed(ddf):
    others = set(multiprocessing.active_children())  # of tests before this one
    loader = ddf.images.dataloader(1, collate_fn=huge, num_workers=1, timeout=SECONDS)
    batches = iter(loader)
    held = [next(batches), next(batches)]
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    with contextlib.suppress(RuntimeError):  # torch's, as soon as the signal comes
        worker.join(SECONDS)
    assert [int(batch.min()) for batch in held] == [int(batch.max()) for batch in held] == [0, 1]
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        list(batches)
    assert [int(batch.max()) for batch in loader] == list(range(20))


def test_shared_memory_is_not_needed_in_torchs_other_strategy_either(ddf, monkeypatch):
    def full(storage):
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    loader = ddf.images.dataloader(2, num_workers=2, collate_fn=large, timeout=SECONDS)
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda rows: (row for row in rows), "cannot pickle 'generator' object"),
        (lambda rows: Record(torch.ones(3, requires_grad=True) * 2), "non-leaf tensor"),
        (lambda rows: {"f": lambda: rows}, r"[Cc]an't pickle"),
    ],
)
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_lost(ddf, made, said):
    loader = ddf.images.dataloader(2, collate_fn=made, num_workers=2, timeout=SECONDS)
    with pytest.raises(dii.ArgumentError, match=rf"can't send a batch[\s\S]*{said}"):
        list(loader)


def test_a_batch_is_one_descriptor(ddf):
    loader = ddf.images.dataloader(
        4, collate_fn=lambda rows: [torch.full((n,), n) for n in range(200)], num_workers=1
    )
    batches = iter(loader)
    held = [next(batches)]
    before = len(os.listdir("/proc/self/fd"))
    held += [next(batches), next(batches)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert all([int(each.sum()) for each in batch] == [n * n for n in range(200)] for batch in held)


def test_a_worker_with_too_many_open_files_names_the_limit(ddf):
    def no_more(rows):
        used = set(map(int, os.listdir("/proc/self/fd")))
        limit = [number for number in range(len(used) + 3) if number not in used][2]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        return large(rows)

    loader = ddf.images.dataloader(4, collate_fn=no_more, num_workers=1, timeout=SECONDS)
    with pytest.raises(RuntimeError, match=r"limit of \d+[\s\S]*`ulimit -n"):
        list(loader)


HOLDS = """
import resource
import torch
from small_frames import lazy_frame, small_frame

ddf = lazy_frame([small_frame(range(250)), small_frame(range(250))])
loader = ddf.images.dataloader(2, num_workers=1, timeout=200)
batches, held = iter(loader), []
held.append(next(batches))
limit = 150
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    for batch in batches:
        held.append(batch)
except RuntimeError as error:
    print(len(held), error)
"""


def test_a_training_that_holds_too_many_batches_is_told_of_the_limit():
    finished = run_python(HOLDS)
    assert "ulimit -n" in finished.stdout, finished.stderr


KILLED = """
import multiprocessing, os, signal, sys
import dask_image_ingest
from small_frames import lazy_frame, small_frame

def much(rows):  # more than a pipe takes, so that a worker waits for it to be read
    return ["text" * 100_000]

if __name__ == "__main__":
    ddf = lazy_frame([small_frame(range(100)), small_frame(range(100))])
    loader = ddf.images.dataloader(
        2, num_workers=2, collate_fn=much, prefetch_factor=9, multiprocessing_context=sys.argv[1]
    )
    batches = iter(loader)
    next(batches)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_end_with_a_training_that_is_killed(context, tmp_path):
    output, errors = tmp_path / "output", tmp_path / "errors"
    training = Fork(run_main, KILLED, [context], output=output, errors=errors)
    assert training.wait(SECONDS) == -9, errors.read_text()
    workers = output.read_text().split()
    assert len(workers) == 2, errors.read_text()
    until(lambda: not any(map(is_running, workers)), "workers outlived their job")


@pytest.fixture
def threads():
    with dask.config.set(scheduler="threads"):
        yield


def columns_of_order(shards):
    ddf = dii.read_webdataset_images(shards, size=16, backend="pandas")
    return ddf, ({}, {"balance": "cls"}, {"weights": "cls"}, {"buckets": [(16, 16), (16, 24)]})


def test_what_the_order_needs_is_computed_before_workers_start(shards, threads, tmp_path):
    ddf, options = columns_of_order(shards)
    computed = tmp_path / "computed"

    def start(graph):  # partitions are read on other threads
        worker = torch.utils.data.get_worker_info()
        if threading.current_thread() is threading.main_thread():
            with computed.open("a") as file:
                file.write("in the training\n" if worker is None else "in a worker\n")

    with Callback(start=start):
        for each in options:
            loader = ddf.images.dataloader(5, shuffle=1, num_workers=2, timeout=SECONDS, **each)
            assert sum(len(batch["cls"]) for batch in loader) == 24
    assert set(computed.read_text().splitlines()) == {"in the training"}


def test_workers_of_a_process_that_has_computed_wait_for_nothing(shards, threads):
    ddf, options = columns_of_order(shards)
    len(ddf), ddf[["cls"]].compute()  # Dask has threads now, which a fork has not
    loaders = [ddf.images.dataloader(5, shuffle=1, **each) for each in options]
    datasets = [loader.dataset for loader in loaders]
    datasets.append(dii.mix_batches([ddf, ddf], 5, format="torch", shuffle=1))
    for dataset in datasets:
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=1, timeout=SECONDS
        )
        assert sum(len(batch["cls"]) for batch in loader) >= 24


IMPORTS = """
import json, os, sys
import dask_image_ingest as dii

def tell(worker):
    print(json.dumps("nvidia.dali.fn" in sys.modules), flush=True)

if __name__ == "__main__":
    ddf = dii.read_webdataset_images(os.environ["SHARD"], size=16, backend="pandas")
    options = {"multiprocessing_context": os.environ["CONTEXT"], "worker_init_fn": tell}
    list(ddf.images.dataloader(8, num_workers=1, **options))
"""


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_worker_begins_with_the_decoder_imported(shards, context):
    assert printed(IMPORTS, SHARD=str(shards[0]), CONTEXT=context) is True


@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_whose_file_changes_raises(tmp_path, shuffle, workers):
    file = tmp_path / "rows.parquet"
    pd.DataFrame({"x": np.arange(5.0)}).to_parquet(file)
    frame = dd.from_map(pd.read_parquet, [file], meta=pd.DataFrame({"x": np.zeros(0)}))
    loader = frame.images.dataloader(2, shuffle=shuffle, num_workers=workers)
    assert len(loader) == 3
    assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(5))
    for count in (9, 3):
        loader.set_epoch(count)
        pd.DataFrame({"x": np.arange(float(count))}).to_parquet(file)
        with pytest.raises(dii.ArgumentError, match=f"partition 0 has {count} rows, and had 5"):
            list(loader)
