"""What is copied, waited for and pinned on a GPU, and how much memory is used at once."""

import os
import subprocess
import sys
from pathlib import Path

import cupy
import dask
import numpy as np
import pytest
from contract import on_host
from simulated.memory import counted
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest import curate

ROWS, BAD = 12, 2
PIXELS = ROWS * 60 * 80 * 3

# Pointers, sizes, keys: what a partition has beside its pixels, in shares of these.
LITTLE = 0.1


@pytest.fixture(scope="module", autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    members = {f"{n:03}.jpg": encode(photograph(60, 80, n)) for n in range(ROWS)}
    members |= {f"bad{n}.jpg": b"no picture" for n in range(BAD)}
    return write_shard(tmp_path_factory.mktemp("shards") / "shard.tar", members)


def read(shard, **options):
    return dii.read_webdataset_images(shard, backend="cudf", **options)


def means(images):
    return np.stack([on_host(each).reshape(-1, 3).mean(axis=0) for each in images])


def share(counts, what):
    return counts[what] / PIXELS


def test_a_read_puts_pixels_into_memory_once_and_waits_once_for_each_batch(shard):
    read(shard).compute()  # builds the pipeline
    with counted() as counts:
        frame = read(shard).compute()
    assert len(frame) == ROWS + BAD
    assert 1 <= share(counts, "peak") < 1 + LITTLE
    assert share(counts, "allocated") < 1 + LITTLE
    assert share(counts, "to_device") < LITTLE
    assert counts["to_host"] == counts["pinned"] == 0
    # For the batch's copy out of DALI's memory, and the mask of the rows without an image.
    assert counts["waits"] <= 2


@pytest.mark.parametrize(
    "query",
    [
        lambda shard: read(shard, errors="drop"),
        lambda shard: (lambda ddf: ddf[ddf.error.isna()])(read(shard)),
        lambda shard: dii.decode_images(read(shard, decode=False)),
        lambda shard: dii.decode_images(read(shard, decode=False).persist(), errors="drop"),
        lambda shard: dii.decode_images(read(shard, decode=False).shuffle("__key__")),
        lambda shard: read(shard).drop(columns="width").rename(columns={"height": "h"}),
    ],
)
def test_a_query_holds_the_pixels_once(shard, query):
    made = query(shard)
    made.compute()
    with counted() as counts:
        made.compute()
    assert 1 <= share(counts, "peak") < 1 + LITTLE
    assert share(counts, "pinned") < LITTLE


OPERATIONS = {
    "drop": lambda ddf, folder: ddf.drop(columns="width").compute(),
    "select": lambda ddf, folder: ddf[["__key__", "image"]].compute(),
    "head": lambda ddf, folder: ddf.head(3),
    "assign": lambda ddf, folder: ddf.assign(area=ddf.width * ddf.height).compute(),
    "similarity": lambda ddf, folder: curate.compute_similarity(ddf, np.eye(3)[0]).compute(),
    "clusters": lambda ddf, folder: curate.find_clusters(ddf, 2).compute(),
    "clusters at once": lambda ddf, folder: curate.find_clusters(ddf.compute(), 2),
    "semantic": lambda ddf, folder: curate.find_semantic_duplicates(ddf, 0.9).compute(),
    "nearest": lambda ddf, folder: curate.find_nearest(ddf, np.eye(3)[0], 3),
    "bytes": lambda ddf, folder: curate.compute_fingerprints(ddf.compute(), ["bytes"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_needs_no_pixels_neither_copies_nor_pins_them(shard, tmp_path, name):
    """What is pinned is never spilled again, and each later slice of it would be a copy."""
    stored = curate.embed(read(shard), means).persist()
    with counted() as counts:
        OPERATIONS[name](stored, tmp_path)
    for what in ("allocated", "to_host", "to_device", "pinned"):
        assert share(counts, what) < LITTLE, what


def test_views_and_batches_pin_nothing_and_come_to_the_host_when_asked(shard):
    stored = read(shard, errors="drop").persist()
    with counted() as counts:
        for batch in stored.images.iter_batches(4, format="cupy"):
            assert batch["image"].shape == (4, 60, 80, 3)
    for what in ("allocated", "to_host", "pinned"):
        assert share(counts, what) < LITTLE, what
    with counted() as counts:
        assert len([*stored.images.iter_batches(4)]) == 3
    assert 1 <= share(counts, "to_host") < 1 + LITTLE


QUERIES = {
    "read": lambda ddf: ddf,
    "filtered": lambda ddf: ddf[(ddf.height == 60) & ddf.error.isna()],
    "computed": lambda ddf: ddf.assign(area=ddf.width * ddf.height),
    "chosen by a sum": lambda ddf: ddf[ddf.width + ddf.height == 140],
    "renamed": lambda ddf: ddf.rename(columns={"height": "h"}),
}


@pytest.mark.parametrize("query", QUERIES)
def test_references_of_an_epoch_are_gathered_on_the_host(shard, tmp_path, query):
    paths = [
        write_shard(tmp_path / f"{n}.tar", {f"{n}.jpg": encode(photograph(60, 80, n))})
        for n in range(3)
    ]

    def batches(backend):
        ddf = QUERIES[query](
            dii.read_webdataset_images([str(shard), *map(str, paths)], backend=backend)
        )
        columns = [n for n in ddf.columns if n not in ("image", "error", "jpg", "__url__")]
        return [*ddf.images.iter_batches(4, columns=columns, shuffle=3)]

    with counted() as counts:
        made = batches("cudf")
    want = batches("pandas")
    assert len(made) == len(want) > 2
    for batch, expected in zip(made, want, strict=True):
        assert list(batch) == list(expected)
        for name, values in batch.items():
            if name != "image":
                assert np.asarray(values).dtype == np.asarray(expected[name]).dtype, name
                np.testing.assert_array_equal(values, expected[name])
    # Of the pixels and the columns of a batch; not of each partition's rows.
    assert counts["waits"] < 40 * len(made)


def test_pixels_are_encoded_from_one_copy_on_the_host(shard, tmp_path):
    stored = read(shard, errors="drop").persist()
    with counted() as counts:
        dii.to_webdataset(stored, str(tmp_path / "o-{shard:06d}.tar"), members={"jpg": "image"})
    assert 1 <= share(counts, "to_host") < 1.5  # and the files, which are a column too
    assert share(counts, "pinned") < LITTLE


def test_what_is_counted_here_is_what_cudf_does(shard):
    """cuDF's own drop() and rename() copy and pin pixels: else the tests above show nothing."""
    for change in ({"columns": "width"}, {"columns": {"width": "w"}}):
        frame = read(shard).compute()
        with counted() as counts:
            made = getattr(frame, "drop" if isinstance(change["columns"], str) else "rename")(
                **change
            )
        assert len(made) == ROWS + BAD
        assert share(counts, "allocated") >= 1
        assert share(counts, "pinned") >= 1


def test_pixels_without_room_are_an_error_that_says_what_to_do(shard, monkeypatch):
    def full(*args):
        raise MemoryError("std::bad_alloc: out_of_memory: Maximum pool size exceeded")

    ddf = read(shard)
    monkeypatch.setattr(cupy, "empty", full)
    with pytest.raises(MemoryError) as raised:
        ddf.compute()
    assert "partition_size" in raised.value.__notes__[0]


FRESH = """
import simulated.plugin, dask, sys
import dask_image_ingest as dii
dask.config.set(scheduler="synchronous")
ddf = dii.read_webdataset_images(sys.argv[1], backend="pandas").to_backend("cudf")
print(type(ddf.compute().images.arrays()[0]).__module__)
"""


def run_alone(code, argument):
    """The words that a program prints in a process of its own."""
    paths = [str(Path(__file__).parent), str(Path(dii.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(argument)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_first_conversion_of_a_process_knows_images(shard):
    assert run_alone(FRESH, shard) == ["cupy"]


POOL = """
import simulated.plugin, rmm, sys
if sys.argv[1] == "managed":
    rmm.mr.set_current_device_resource(rmm.mr.ManagedMemoryResource())
if sys.argv[1] == "worker":
    from distributed import Worker
    Worker._instances = ["a worker"]
import dask_image_ingest.frames.cudf.backend
print(type(rmm.mr.get_current_device_resource()).__name__)
"""


@pytest.mark.parametrize(
    ("process", "resource"),
    [("new", "Pool"), ("managed", "ManagedMemoryResource"), ("worker", "CudaMemoryResource")],
)
def test_a_process_without_a_resource_of_its_own_gets_a_pool(process, resource):
    assert run_alone(POOL, process) == [resource]
