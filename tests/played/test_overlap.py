"""Two partitions on one GPU: who works while DALI decodes, and who waits for it."""

import threading
import weakref

import dask
import numpy as np
import pytest
from processes import SECONDS
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.dataset.scan import task
from dask_image_ingest.decode import dali, planner
from dask_image_ingest.frames.cudf.pixels import DevicePixels

IMAGES, BATCH = 12, 4


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Shards of three batches each."""
    monkeypatch.setattr(planner, "batch_bytes", lambda device: BATCH * 60 * 80 * 3)
    return [
        write_shard(
            tmp_path / f"{shard}.tar",
            {f"{n:03}.jpg": encode(photograph(60, 80, 100 * shard + n)) for n in range(IMAGES)},
        )
        for shard in range(6)
    ]


class Log:
    """What happened, in order: the thread of a partition, and what it or DALI did for it."""

    def __init__(self, monkeypatch):
        self.lines, self.alive, self.most = [], weakref.WeakSet(), 0
        self.before = self.after = lambda line: None  # called where a line is written
        self._owners = {}
        self._lock = threading.Lock()
        decode, as_input = dali.DaliDecoder._decode, dali.DaliDecoder._as_input
        read, append = task._read_shard, DevicePixels.append

        def logged_read(*args):
            self.write("scans")
            return read(*args)

        def logged_input(decoder, batch):
            inputs = as_input(decoder, batch)
            self._owners[id(inputs["images"])] = threading.get_ident()
            self.write("has a batch")
            return inputs

        def logged_decode(decoder, inputs):
            owner = self._owners.pop(id(inputs["images"]))
            self.write("is decoded", owner)
            images = decode(decoder, inputs)
            self.alive.add(images)
            self.most = max(self.most, len(self.alive))
            self.write("was decoded", owner)
            return images

        def logged_append(buffer, images):
            self.write("copies")
            append(buffer, images)
            self.write("has copied")

        monkeypatch.setattr(task, "_read_shard", logged_read)
        monkeypatch.setattr(dali.DaliDecoder, "_as_input", logged_input)
        monkeypatch.setattr(dali.DaliDecoder, "_decode", logged_decode)
        monkeypatch.setattr(DevicePixels, "append", logged_append)

    def write(self, what, who=None):
        line = who or threading.get_ident(), what
        self.before(line)
        with self._lock:
            self.lines.append(line)
        self.after(line)

    def of(self, who):
        return [what for owner, what in self.lines if owner == who]


def until(happened):
    """Wait for it; a partition that waits for the other would wait in vain."""
    assert happened.wait(SECONDS), "nothing happens meanwhile"


def read(shards, threads):
    ddf = dii.read_webdataset_images(shards, backend="cudf")
    with dask.config.set(scheduler="threads", num_workers=threads):
        return ddf.compute()


def test_a_partition_is_scanned_and_its_first_batch_made_while_another_is_decoded(
    shards, monkeypatch
):
    log, ready = Log(monkeypatch), threading.Event()

    def before(line):
        if line[1] == "was decoded":
            until(ready)

    def after(line):
        if len({who for who, what in log.lines if what == "has a batch"}) == 2:
            ready.set()

    log.before, log.after = before, after
    assert len(read(shards[:2], 2)) == 2 * IMAGES
    first = next(who for who, what in log.lines if what == "is decoded")
    (other,) = {who for who, _ in log.lines} - {first}
    begin = log.lines.index((first, "is decoded"))
    meanwhile = log.lines[: log.lines.index((first, "was decoded"), begin)]
    assert (other, "scans") in meanwhile
    assert (other, "has a batch") in meanwhile


def test_dali_decodes_one_partition_while_the_other_copies(shards, monkeypatch):
    log, decodes = Log(monkeypatch), threading.Event()
    copying = []

    def before(line):
        who, what = line
        if what == "copies" and not copying:
            copying.append(who)
            until(decodes)
        if copying and what == "was decoded" and who != copying[0]:
            decodes.set()

    log.before = before
    assert len(read(shards[:2], 2)) == 2 * IMAGES
    assert decodes.is_set()


def test_dali_has_one_batch_at_a_time_and_pixels_of_two_for_each_of_two_partitions(
    shards, monkeypatch
):
    log = Log(monkeypatch)
    frame = read(shards, 6)
    for row, image in enumerate(frame.images.arrays()):
        want = photograph(60, 80, 100 * (row // IMAGES) + row % IMAGES)
        assert np.abs(image.get().astype(int) - np.asarray(want)).mean() < 8
    of_dali = [what for _, what in log.lines if what.endswith(" decoded")]
    assert of_dali == ["is decoded", "was decoded"] * (len(of_dali) // 2)
    assert log.most <= 4


def test_a_thread_alone_has_its_next_batch_decoded_while_it_copies(shards, monkeypatch):
    log = Log(monkeypatch)
    read(shards[:1], 1)
    lines = log.of(threading.get_ident()) or log.of(log.lines[0][0])
    # The second batch is made before the first is copied, and so on.
    made = [n for n, what in enumerate(lines) if what == "has a batch"]
    copied = [n for n, what in enumerate(lines) if what == "copies"]
    assert len(made) == len(copied) > 2
    assert all(later < copy for later, copy in zip(made[1:], copied, strict=False))
