"""Training on shards of a web server: the rows of local ones, and no bytes but those of the rows.

The server's own count of the ranges it was asked for is the witness.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from urllib.parse import unquote

import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from faulty_server import faulty_server
from PIL import Image
from tars import tar
from topologies import fake_torch, in_turn

import dask_image_ingest as dii


def photograph(rng, edge=150):
    file = io.BytesIO()
    pixels = np.frombuffer(rng.randbytes(3 * edge * edge), np.uint8)
    Image.fromarray(pixels.reshape(edge, edge, 3)).save(file, "PNG", compress_level=1)
    return file.getvalue()


class Shards:
    """The same shards on a server and in a folder, and the images among their bytes."""

    def __init__(self, rng, folder, rows):
        self.files, self.nbytes, number = {}, {}, 0
        photographs = [photograph(rng) for _ in range(8)]
        for shard, count in enumerate(rows):
            members = {}
            for _ in range(count):
                bad = rng.random() < 0.05
                image = b"none" if bad else rng.choice(photographs)
                members[f"{number:04d}.png"] = image
                members[f"{number:04d}.cls"] = str(number).encode()
                self.nbytes[number] = len(image)
                number += 1
            self.files[f"{shard:02d}.tar"] = tar(members)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        self.local = dii.read_webdataset_images(folder, size=8, backend="pandas")

    def served(self):
        return faulty_server(files={f"/{name}": content for name, content in self.files.items()})

    def urls(self, url):
        return [f"{url}/{name}" for name in sorted(self.files)]

    def remote(self, url, index=False):
        return dii.read_webdataset_images(
            self.urls(url), size=8, backend="pandas", index=index and str(index)
        )


@pytest.fixture
def shards(rng, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    return Shards(rng, folder, [*rng.choices(range(20, 60), k=5), 0, 1])


@pytest.fixture
def server(shards):
    with shards.served() as server:
        yield server


@pytest.fixture
def indexed(shards, server, tmp_path):
    """The shards on the server, with indexes in a folder."""
    index = tmp_path / "indexes"
    dii.write_index(shards.urls(server.url), folder=str(index))
    return shards.remote(server.url, index)


def epoch_of(frame, rank, ranks, workers, **options):
    """Batches of a rank, as keys and images."""
    by_worker = []
    for worker in range(workers):
        with pytest.MonkeyPatch.context() as patch:
            fake_torch(patch, (worker, workers), (rank, ranks))
            batches = frame.images.iter_batches(format="torch", columns=["cls"], **options)
            by_worker.append([(batch["cls"].tolist(), batch["image"]) for batch in batches])
    return in_turn(by_worker)


def asked(server):
    """The ranges of shards that the server was asked for, by shard."""
    ranges = Counter()
    for method, path, headers in server.seen:
        if path.endswith(".tar"):
            assert method == "GET"
            start, stop = re.fullmatch(r"bytes=(\d+)-(\d+)", headers["Range"]).groups()
            ranges[unquote(path), int(start), int(stop) + 1] += 1
    return ranges


def total(ranges):
    return sum((stop - start) * times for (_, start, stop), times in ranges.items())


@pytest.mark.rounds(2, nightly=40)
def test_the_order_is_that_of_local_shards_and_each_rank_fetches_its_images_alone(
    rng, shards, indexed, server
):
    ranks, workers = rng.choice([(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
    options = {"batch_size": 24 // ranks, "shuffle": rng.choice([None, 0, 5])}
    options["epoch"] = rng.randint(0, 2)
    if rng.random() < 0.3:
        options |= {"steps": rng.randint(1, 12), "balance": "cls"}
    for rank in range(ranks):
        local = epoch_of(shards.local, rank, ranks, workers, **options)
        server.reset()
        remote = epoch_of(indexed, rank, ranks, workers, **options)
        for (keys, images), (others, pictures) in zip(remote, local, strict=True):
            assert keys == others
            np.testing.assert_array_equal(images, pictures)
        if options["shuffle"] is None and ranks * workers == 1:
            continue  # shards are read from end to end
        rows = [key for keys, _ in remote for key in keys]
        ranges = asked(server)
        # Apart from the beginning of each shard that is opened, and the edges of pages.
        heads = sum(times for (_, start, _), times in ranges.items() if not start)
        images = sum(shards.nbytes[row] for row in rows)
        assert total(ranges) - 512 * heads <= 1.15 * images + 60_000, (ranks, workers, options)


def test_the_first_batch_comes_before_most_is_fetched(shards, indexed, server):
    server.reset()
    batches = indexed.images.iter_batches(8, shuffle=3, columns=["cls"])
    next(batches)
    assert total(asked(server)) < sum(shards.nbytes.values()) / 3
    batches.close()


def test_neighbouring_rows_are_one_request(rng, tmp_path):
    shards = Shards(rng, tmp_path, [256, 256])
    index = tmp_path / "indexes"
    with shards.served() as server:
        dii.write_index(shards.urls(server.url), folder=str(index))
        frame = shards.remote(server.url, index)
        server.reset()
        in_order = frame.images.iter_batches(32, shard=(1, 2), columns=["cls"])
        assert sum(len(batch["cls"]) for batch in in_order) > 200
        assert len(asked(server)) <= 2 * 256 / 32 + 8


def test_shards_without_indexes_are_counted_with_one_warning(shards, server):
    frame = shards.remote(server.url)
    with pytest.warns(UserWarning, match=r"/00.tar.*write_index") as warned:
        batches = list(frame.images.iter_batches(16, shuffle=2, columns=["cls"]))
    assert len(warned) == 1
    local = shards.local.images.iter_batches(16, shuffle=2, columns=["cls"])
    assert [b["cls"].tolist() for b in batches] == [b["cls"].tolist() for b in local]


@pytest.mark.parametrize("place", ["local", "remote"])
def test_each_worker_calls_a_function_with_its_own_rows(
    place,
    shards,
    indexed,
    work,  # noqa: F811
):
    seen = []

    def mean(images):
        seen.append(len(images))
        return images.mean((1, 2, 3))

    frame = shards.local if place == "local" else indexed
    frame = frame.images.map_batches(mean, {"mean": "float32"}, keep_image=True)
    frame = frame.assign(double=frame["mean"] * 2)
    good = frame.compute()
    good = good[good.image.notna()].set_index("cls")["double"]
    seen.clear()
    work.clear()
    frame = frame[["image", "cls", "double"]]
    options = {"batch_size": 8, "shuffle": 0, "format": "torch"}
    for worker in range(3):
        with pytest.MonkeyPatch.context() as patch:
            fake_torch(patch, (worker, 3), (0, 1))
            for batch in frame.images.iter_batches(**options):
                np.testing.assert_array_equal(batch["double"], good[batch["cls"]])
    assert sum(seen) == len(good)
    assert work["decoded"] == len(shards.nbytes)


def test_a_shard_that_changes_during_the_epoch_is_an_error(shards, indexed, server):
    batches = indexed.images.iter_batches(8, shuffle=0, columns=["cls"])
    next(batches)
    for path in server.files:
        server.files[path] = server.files[path][:512] + server.files[path]
    with pytest.raises(dii.ShardError, match="changed"):
        list(batches)


def test_temporary_failures_cost_no_row(shards, indexed, server):
    server.rates = {"503": 0.1, "reset": 0.1}
    batches = indexed.images.iter_batches(8, shuffle=0, columns=["cls"])
    local = shards.local.images.iter_batches(8, shuffle=0, columns=["cls"])
    assert [b["cls"].tolist() for b in batches] == [b["cls"].tolist() for b in local]
