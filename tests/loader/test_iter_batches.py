"""``iter_batches``: every image once, in the promised order, with little memory, resumable."""

from __future__ import annotations

import gc
import io
import json
import sys
import weakref
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from corpus import save
from counted import work  # noqa: F401  a fixture
from forked_python import run_python
from photo_shards import write_tar
from PIL import Image
from processes import printed, until
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, size=16, backend="pandas")


@pytest.fixture(scope="module")
def with_bad_ones(photos, tmp_path_factory):
    """Five shards of 0 to 7 images, of which some are no images."""
    folder = tmp_path_factory.mktemp("bad")
    for shard, count in enumerate([6, 1, 7, 0, 5]):
        members = {"note.txt": b""}
        for number in range(count):
            photo = photos[shard * 4 + number]
            bad = (shard + number) % 4 == 1
            members[f"{shard}-{number}.{photo.extension}"] = b"none" if bad else photo.encoded
        write_tar(folder / f"{shard}.tar", members)
    return dii.read_webdataset_images(folder, size=16, backend="pandas")


def keys(batches):
    return [key for batch in batches for key in batch["__key__"]]


def good_keys(ddf):
    frame = ddf.compute()
    return frame.loc[frame["image"].notna(), "__key__"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_every_image_comes_once_in_order_and_in_full_batches(ddf, prefetch):
    batches = list(ddf.images.iter_batches(5, prefetch=prefetch))
    assert [len(batch["image"]) for batch in batches] == [5, 5, 5, 5, 4]
    frame = ddf.compute()
    assert keys(batches) == frame["__key__"].tolist()
    images = np.concatenate([batch["image"] for batch in batches])
    np.testing.assert_array_equal(images, np.stack(frame.images.arrays()))
    assert [c for batch in batches for c in batch["cls"]] == frame["cls"].tolist()


def test_an_eager_frame_gives_the_same(ddf):
    lazy, eager = ddf.images.iter_batches(7), ddf.compute().images.iter_batches(7)
    for one, other in zip(lazy, eager, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(one["image"], other["image"])


def test_a_last_smaller_batch_may_be_dropped(ddf):
    assert [len(b["image"]) for b in ddf.images.iter_batches(5, drop_last=True)] == [5] * 4


def test_rows_without_an_image_are_left_out(with_bad_ones):
    batches = list(with_bad_ones.images.iter_batches(3, columns=["__key__"]))
    assert keys(batches) == good_keys(with_bad_ones)
    rows = with_bad_ones.compute()
    sizes = [int(rows.image[at : at + 3].notna().sum()) for at in range(0, len(rows), 3)]
    assert [len(batch["image"]) for batch in batches] == sizes


@pytest.mark.filterwarnings("ignore:the first shard.*has no image:UserWarning")
def test_shards_of_latents_read_as_images_say_what_to_do(tmp_path):
    (tmp_path / "latents").mkdir()
    (tmp_path / "some").mkdir()
    latent = io.BytesIO()
    np.save(latent, np.zeros((4, 2, 2), np.float32))
    for shard in "ab":
        members = {f"{shard}{n}.npy": latent.getvalue() for n in range(9)}
        write_tar(tmp_path / "latents" / f"{shard}.tar", members)
    options = {"members": {"npy": "list<list<list<float32>>>"}, "backend": "pandas"}
    read = dii.read_webdataset_images(tmp_path / "latents", **options)
    for order in ({}, {"shuffle": 0}, {"shuffle": 0, "collate_fn": list}):
        with pytest.raises(dii.ArgumentError, match=r"no row has an image in .*decode=False"):
            list(read.images.iter_batches(4, columns=["npy"], **order))
    rows = dii.read_webdataset_images(tmp_path / "latents", decode=False, **options)
    batches = list(rows.images.iter_batches(4, columns=["npy"], shuffle=0))
    assert [len(batch["npy"]) for batch in batches] == [4, 4, 4, 4, 2]
    # Some that are missing or damaged are left out, as ever: also all of the first batch.
    write_tar(tmp_path / "some" / "a.tar", {"a.txt": b"", "b.jpg": b"none", "c.txt": b""})
    write_tar(tmp_path / "some" / "b.tar", {"d.png": save(Image.new("RGB", (3, 3)), "PNG")})
    some = dii.read_webdataset_images(tmp_path / "some", image="jpg;png", backend="pandas")
    for order in ({}, {"shuffle": 0}):
        assert keys(some.images.iter_batches(3, **order)) == ["d"]


def test_images_that_differ_in_shape_come_as_a_list(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    (batch,) = ddf.images.iter_batches(24, columns=[])
    assert [image.shape for image in batch["image"]] == [
        image.shape for image in ddf.compute().images.arrays()
    ]


def test_only_the_columns_asked_for_are_read(ddf):
    batches = ddf.images.iter_batches(8, columns=["cls"])
    assert next(batches).keys() == {"image", "cls"}
    batches.close()


def test_a_column_with_nulls_is_an_error_that_names_it(photos, tmp_path):
    encoded = [photo.encoded for photo in photos[:2]]
    write_tar(tmp_path / "a.tar", {"a.jpg": encoded[0], "a.cls": b"1", "b.jpg": encoded[1]})
    ddf = dii.read_webdataset_images(tmp_path, size=8, backend="pandas")
    with pytest.raises(dii.ArgumentError, match="'cls' has nulls"):
        next(ddf.images.iter_batches(2))
    assert len(next(ddf.images.iter_batches(2, columns=[]))["image"]) == 2


def test_vectors_come_as_two_dimensional_arrays(ddf):
    embedded = ddf.images.map_batches(
        lambda x: x.mean(axis=(1, 2)), {"v": "list<float32>"}, keep_image=True
    )
    (batch,) = embedded.images.iter_batches(24, columns=["v"])
    np.testing.assert_allclose(batch["v"], batch["image"].mean(axis=(1, 2)), rtol=1e-6)


def test_shuffle_is_a_seed_or_yes_or_no_as_in_torch(ddf):
    def order(shuffle):
        batches = ddf.images.iter_batches(5, columns=["__key__"], shuffle=shuffle)
        position = batches.position
        again = ddf.images.iter_batches(5, columns=["__key__"], shuffle=shuffle, start=position)
        assert keys(batches) == keys(again)
        return keys(ddf.images.iter_batches(5, columns=["__key__"], shuffle=shuffle))

    assert order(True) == order(0) != order(False)
    assert order(False) == order(None) == ddf["__key__"].compute().tolist()
    assert order(1) != order(True)


@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"drop_last": True}, {"start": 2}])
def test_a_loop_over_batches_that_ended_begins_again(ddf, options):
    batches = ddf.images.iter_batches(5, **options)
    once, again = keys(batches), keys(batches)
    whole = keys(ddf.images.iter_batches(5, **options | {"start": 0}))
    assert again == whole
    assert once == whole[5 * options.get("start", 0) :]
    position = batches.position
    assert list(ddf.images.iter_batches(5, **options | {"start": position})) == []


def test_a_loop_over_batches_that_were_left_or_closed_goes_on(ddf):
    batches = ddf.images.iter_batches(5)
    got = []
    for batch in batches:
        got += keys([batch])
        break
    for batch in batches:
        got += keys([batch])
        break
    batches.close()
    assert got + keys(batches) == ddf.compute()["__key__"].tolist()


class TestShuffle:
    def test_every_image_comes_once_in_another_order(self, ddf):
        plain = ddf.compute()["__key__"].tolist()
        got = keys(ddf.images.iter_batches(5, shuffle=1))
        assert sorted(got) == plain
        assert got != plain
        mixed = [plain.index(key) // 8 for key in got]
        assert mixed != sorted(mixed, key=mixed.index), "no partitions were mixed"

    def test_a_seed_is_an_order(self, ddf):
        once, again, other = (keys(ddf.images.iter_batches(5, shuffle=s)) for s in (1, 1, 2))
        assert once == again != other

    def test_images_stay_with_their_keys(self, ddf):
        frame = ddf.compute()
        images = dict(zip(frame["__key__"], frame.images.arrays(), strict=True))
        for batch in ddf.images.iter_batches(5, shuffle=3):
            for key, image in zip(batch["__key__"], batch["image"], strict=True):
                np.testing.assert_array_equal(image, images[key])

    @pytest.mark.slow
    def test_partitions_of_any_size(self, with_bad_ones):
        for seed in range(5):
            got = keys(with_bad_ones.images.iter_batches(4, columns=["__key__"], shuffle=seed))
            assert sorted(got) == sorted(good_keys(with_bad_ones))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "shuffle"),
    [
        (4, None),
        (4, 7),
        (50, 0),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [(1, None), (1, 0), (1, 7), (4, 0), (50, None), (50, 7)]
        ),
    ],
)
def test_it_goes_on_where_it_stopped(with_bad_ones, shuffle, batch_size):
    options = {"columns": ["__key__"], "shuffle": shuffle}
    whole, positions = [], [(0, 0, shuffle, None, None)]
    batches = with_bad_ones.images.iter_batches(batch_size, **options)
    for batch in batches:
        whole.append(batch["__key__"].tolist())
        positions.append(json.loads(json.dumps(batches.position)))
    for done, position in enumerate(positions):
        for start in (done, position):
            rest = with_bad_ones.images.iter_batches(batch_size, start=start, **options)
            assert [batch["__key__"].tolist() for batch in rest] == whole[done:], (done, start)


def test_going_on_from_a_position_reads_nothing_before_it(ddf, work):  # noqa: F811
    batches = ddf.images.iter_batches(4, prefetch=0)
    for _ in range(4):
        next(batches)
    batches.close()
    work.clear()
    list(ddf.images.iter_batches(4, start=batches.position))
    assert work["decoded"] == 8


def test_no_more_is_read_than_asked_for(ddf, work):  # noqa: F811
    batches = ddf.images.iter_batches(4, prefetch=1)
    next(batches)
    batches.close()
    assert work["decoded"] <= 16


def test_wrong_arguments_are_refused_at_the_call(ddf):
    for options in [
        {"batch_size": 0},
        {"batch_size": "4"},
        {"batch_size": 4.0},
        {"prefetch": -1},
        {"prefetch": 0.5},
        {"shuffle": "seed"},
        {"shuffle": -1},
        {"epoch": -1},
        {"epoch": 1.0},
        {"steps": 0},
        {"steps": 2, "repeat": True},
        {"repeat": 1},
        {"weights": "cls", "balance": "cls"},
        {"weights": "nothing"},
        {"balance": 3},
        {"start": -1},
        {"start": True},
        {"format": "jax"},
        {"format": None},
        {"columns": ["nothing"]},
        {"columns": ["cls", "__key__", "cls"]},
    ]:
        with pytest.raises(dii.ArgumentError):
            ddf.images.iter_batches(**{"batch_size": 4} | options)


def test_numbers_may_be_of_numpy(ddf):
    two = np.int64(2)
    batches = ddf.images.iter_batches(two, start=two, shuffle=two, prefetch=two)
    assert keys(batches) == keys(ddf.images.iter_batches(2, start=2, shuffle=2))


def test_the_position_is_known_before_the_first_batch(with_bad_ones):
    batches = with_bad_ones.images.iter_batches(3, columns=["__key__"])
    position = [next(batches) for _ in range(2)] and batches.position
    batches.close()
    waiting = with_bad_ones.images.iter_batches(3, start=2)
    assert waiting.position == position


def test_a_package_that_is_missing_is_named(ddf, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="cupy"):
        ddf.images.iter_batches(4, format="cupy")


@pytest.mark.newest
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shuffle", "most"), [([], 3), (["3"], 17)], ids=["in order", "shuffled: 1 GiB is 14"]
)
def test_memory_stays_within_a_few_partitions_of_twenty(shuffle, most):
    program = ROOT / "tests" / "support" / "bounded_memory.py"
    finished = run_python(program.read_text(), *shuffle)
    assert finished.returncode == 0, finished.stderr
    peak = json.loads(finished.stdout)["peak"]
    print(f"peak: {peak:.2f} partitions")
    assert 1 < peak <= most


@pytest.mark.torch
def test_torch_tensors_share_the_memory_of_the_partition(ddf):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0")
    frame = ddf.get_partition(0).compute()
    arrays = frame.images.arrays()
    batches = list(frame.images.iter_batches(4, format="torch"))
    assert [len(batch["image"]) for batch in batches] == [4, 4]
    for batch, first in zip(batches, (arrays[0], arrays[4]), strict=True):
        assert batch["image"].data_ptr() == first.__array_interface__["data"][0]
        assert batch["image"].dtype == torch.uint8
        assert batch["cls"].dtype == torch.int64
        assert isinstance(batch["__key__"], list)
    np.testing.assert_array_equal(batches[1]["image"], np.stack(arrays[4:]))


@pytest.mark.slow
@pytest.mark.parametrize("persist", [False, True])
def test_partitions_are_read_ahead_on_the_workers_of_a_cluster(client, ddf, persist):
    want = ddf.compute()["__key__"].tolist()
    with dask.config.set(scheduler=None):
        frame = ddf.persist() if persist else ddf
        batches = frame.images.iter_batches(5, columns=["__key__"])
        first = next(batches)
        assert [*first["__key__"], *keys(batches)] == want
        assert len(keys(frame.images.iter_batches(5, shuffle=1, start=2))) == 14
    if not persist:
        until(lambda: not client.sync(client.scheduler.who_has), "results stayed on the workers")


@pytest.mark.slow
def test_tasks_on_all_workers_may_iterate(client, ddf, shards):
    want = ddf.compute()["__key__"].tolist()
    tasks = [
        client.submit(keys_in_a_task, shards, start) for start in (0, (0, 10, None, None, None))
    ]
    first, second = client.gather(tasks)
    assert first == want
    assert second == want[10:]


def keys_in_a_task(shards, start):
    with dask.config.set(scheduler=None):
        ddf = dii.read_webdataset_images(shards, size=16, backend="pandas")
        batches = ddf.images.iter_batches(5, columns=["__key__"], start=start)
        return [key for batch in batches for key in batch["__key__"]]


ENDS_EARLY = """
import json, os, time
import dask_image_ingest as dii
from distributed import Client, LocalCluster

def stalls(frame, first):
    if first not in list(frame["__key__"]):
        time.sleep(600)
    return frame

if __name__ == "__main__":
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    client = Client(cluster)
    paths = json.loads(os.environ["SHARDS"])
    ddf = dii.read_webdataset_images(paths, size=16, backend="pandas")
    ddf = ddf.map_partitions(stalls, os.environ["FIRST"], meta=ddf._meta)
    batches = ddf.images.iter_batches(5)
    next(batches)
    print(json.dumps("ends"), flush=True)
"""


@pytest.mark.nightly
@pytest.mark.newest
@pytest.mark.slow
def test_a_script_that_ends_does_not_wait_for_a_partition_of_a_cluster(shards, ddf):
    first = ddf.get_partition(0).compute()["__key__"].iloc[0]
    paths = json.dumps([str(shard) for shard in shards])
    assert printed(ENDS_EARLY, FIRST=first, SHARDS=paths) == "ends"


def test_the_collector_may_end_an_iteration_on_a_thread_that_reads(ddf):
    batches = ddf.images.iter_batches(5)
    next(batches)
    (source,) = batches._sources
    source._threads.submit(batches.close).result(20)
    assert next(batches, None) is None


@pytest.mark.parametrize("shuffle", [None, 1])
def test_an_iterator_is_freed_with_its_last_reference(ddf, shuffle):
    batches = ddf.images.iter_batches(5, shuffle=shuffle)
    assert keys(batches)
    freed = weakref.ref(batches)
    del batches
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("shuffle", [None, 1])
def test_rows_are_those_of_a_file_that_was_replaced(tmp_path, shuffle):
    """Also if the frame has the name that it had before."""
    file = tmp_path / "rows.parquet"
    for count in (5, 9, 3):
        pd.DataFrame({"x": np.arange(float(count))}).to_parquet(file)
        frame = dd.from_map(pd.read_parquet, [file], meta=pd.DataFrame({"x": np.zeros(0)}))
        batches = frame.images.iter_batches(2, shuffle=shuffle)
        assert sorted(x for batch in batches for x in batch["x"]) == list(range(count))


@pytest.mark.parametrize("shuffle", [None, 1])
def test_a_file_that_changes_after_its_rows_were_counted_is_an_error(tmp_path, shuffle):
    file = tmp_path / "rows.parquet"
    for count in (9, 3):
        pd.DataFrame({"x": np.arange(5.0)}).to_parquet(file)
        frame = dd.from_map(pd.read_parquet, [file], meta=pd.DataFrame({"x": np.zeros(0)}))
        batches = frame.images.iter_batches(2, shuffle=shuffle)
        assert len(batches) == 3
        pd.DataFrame({"x": np.arange(float(count))}).to_parquet(file)
        with pytest.raises(dii.ArgumentError, match=f"partition 0 has {count} rows, and had 5"):
            list(batches)


@pytest.mark.parametrize("shuffle", [None, 1])
def test_a_batch_without_rows_is_none_where_a_function_collates(shuffle):
    frames = [small_frame([0, 1, 2], bad={1}), small_frame([3, 4])]

    def batches(**options):
        frame = lazy_frame(frames)
        collate = {"collate_fn": lambda rows: np.stack([row["key"] for row in rows])}
        return list(frame.images.iter_batches(1, shuffle=shuffle, **collate, **options))

    steps = batches()
    assert len(steps) == 5
    assert sorted(int(step[0]) for step in steps if step is not None) == [0, 2, 3, 4]
    ranks = [batches(shard=(rank, 4)) for rank in range(4)]
    assert {len(rank) for rank in ranks} == {2}
    assert sum(step is None for rank in ranks for step in rank) == 8 - 4


def test_a_batch_of_a_bucket_without_rows_has_its_shape(with_bad_ones):
    batches = with_bad_ones.images.iter_batches(1, columns=[], buckets=[(8, 16)])
    assert {batch["image"].shape for batch in batches} == {(0, 8, 16, 3), (1, 8, 16, 3)}


@pytest.mark.torch
def test_times_are_lists_for_torch():
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    times = [np.array(["2020-01-01T00:00:00.000000001"], "M8[ns]"), np.array([], "M8[ns]")]
    frame = pd.DataFrame({"days": times, "key": [0, 1]})
    (batch,) = frame.images.iter_batches(2, format="torch")
    assert batch["days"] == [[pd.Timestamp("2020-01-01T00:00:00.000000001")], []]
