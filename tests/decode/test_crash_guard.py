"""A decoder that kills its process costs one row, and no more workers than dask allows."""

from __future__ import annotations

import os
import pickle
import re
import struct
import subprocess
import sys

import dask
import numpy as np
import psutil
import pytest
from corpus import picture, save
from crasher import IN_DALI, IN_PILLOW, plant
from distributed import Client, LocalCluster
from forked_python import run_python
from handmade import insert_after_soi, jpeg_segment, webp_with_exif
from photo_shards import write_tar

import dask_image_ingest as dii
from dask_image_ingest import cli
from dask_image_ingest.decode import (
    DecodeSpec,
    EncodedImages,
    Origin,
    crash_guard,
    crash_log,
    decode,
)
from dask_image_ingest.decode.buffers import unknown
from dask_image_ingest.decode.crash_guard import DecodeSubprocess
from dask_image_ingest.decode.dali import parsed_shape
from dask_image_ingest.decode.formats import BadImage
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.errors import DaskImageIngestError

pytestmark = pytest.mark.slow

CULPRITS = {"07": IN_DALI, "31": IN_PILLOW}


@pytest.fixture(scope="module")
def members(photos):
    """40 good images; two of them kill, one in a batch of DALI and one in Pillow."""
    from corpus import images

    found = {f"{n:02}.{p.extension}": p.encoded for n, p in enumerate([*photos, *photos[:16]])}
    jpeg = images()["jpeg-420"]
    for key, bug in CULPRITS.items():
        # Pillow gets what DALI should not see, such as this one.
        image = images()["jpeg-exif-twice"] if bug is IN_PILLOW else jpeg
        found = {name: data for name, data in found.items() if not name.startswith(key)}
        found[f"{key}.jpg"] = insert_after_soi(image, jpeg_segment(0xFE, bug))
    return found


@pytest.fixture
def shards(members, tmp_path):
    named = sorted(members.items())
    return [
        write_tar(tmp_path / f"{n}.tar", named[start : start + 10])
        for n, start in enumerate(range(0, 40, 10))
    ]


def arrays_by_key(frame) -> dict[str, np.ndarray | None]:
    return dict(zip(frame["__key__"], frame.images.arrays(), strict=True))


def check(frame, members) -> None:
    """All rows are there, the culprits say why they have no pixels, the others have theirs."""
    assert sorted(frame["__key__"]) == [f"{n:02}" for n in range(40)]
    errors = frame.set_index("__key__")["error"].dropna()
    assert errors.to_dict() == dict.fromkeys(
        CULPRITS, "crashed-decoder: decoding it kills the process (SIGSEGV)"
    )
    got = arrays_by_key(frame)
    for name, data in members.items():
        key = name[:2]
        if key not in CULPRITS:
            np.testing.assert_array_equal(got[key], pixels_alone(data))


class Kept:
    """Pixel buffer of one image."""

    def append(self, images):
        (image,) = images
        self.image = np.array(image)

    def finish(self):
        return self.image.reshape(-1)


def pixels_alone(data: bytes) -> np.ndarray:
    def ours(row):
        return Origin(f"process {os.getpid()}", row, "the image")

    kept = Kept()
    images = EncodedImages([read_header(data, 10**9)], lambda _: data, ours)
    decode(images, [DecodeSpec()], [kept])
    return kept.image


@pytest.mark.nightly
@pytest.mark.usefixtures("spawned")
def test_a_decoder_crash_costs_one_row_and_one_worker(shards, members, tmp_path, monkeypatch):
    for name, value in plant(tmp_path / "bug").items():
        monkeypatch.setenv(name, value)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        ddf = dii.read_webdataset_images(shards, backend="pandas")
        check(ddf.compute(scheduler=client), members)
        deaths = client.run_on_scheduler(died)
        assert deaths == len(CULPRITS)
        # The scheduler remembers the culprits: nobody dies again, whatever is asked.
        check(ddf[list(ddf.columns)[::-1]].compute(scheduler=client), members)
        assert client.run_on_scheduler(died) == deaths


def died(dask_scheduler) -> int:
    return sum(
        event["action"] == "remove-worker" and not event["expected"]
        for _, event in dask_scheduler.get_events("all")
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("spawned")
def test_a_job_that_died_of_an_image_names_the_shard(
    shards, members, tmp_path, monkeypatch, capsys
):
    """Of workers of which Dask allows none to die."""
    for name, value in plant(tmp_path / "bug").items():
        monkeypatch.setenv(name, value)
    said = rf"1 worker that read .*{shards[3].name} died, the last one at tcp.*allowed-failures"
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
        dask.config.set(scheduler=None),
    ):
        address = cluster.scheduler_address
        assert cli.main(["check", str(shards[3]), "--scheduler", address]) == 1
        assert re.search(said, capsys.readouterr().err)
        ddf = dii.read_webdataset_images(shards[3], backend="pandas", partition_size=None)
        mapped = ddf[ddf.height > 1].images.map_batches(sums, {"n": "int64"}, keep_image=True)
        with pytest.raises(DaskImageIngestError, match=said):
            list(mapped.images.iter_batches(4))


def sums(images):
    return [int(image.sum()) for image in images]


@pytest.fixture
def blamed(monkeypatch):
    """The images that are logged as ones that kill their decoder."""
    images = []
    monkeypatch.setattr(crash_log, "remember", lambda data, death: images.append(data))
    return images


@pytest.mark.more
@pytest.mark.newest
def test_a_kill_of_the_guarded_process_blames_no_image(photos, blamed):
    data = photos[0].encoded
    header = read_header(data, 10**9)
    with DecodeSubprocess(DecodeSpec()) as process:
        process.decode(header, data, unknown(0))
        child = psutil.Process(process._process.pid)
        child.kill()  # as an out-of-memory killer might
        np.testing.assert_array_equal(process.decode(header, data, unknown(0)), pixels_alone(data))
        second = psutil.Process(process._process.pid)
    assert not second.is_running()
    assert not blamed


DIES_ANSWERING = """
import os, pickle, sys
for _ in "path", "decoding":
    pickle.load(sys.stdin.buffer)
for answer in {answers}:
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    if answer.endswith(b"."):  # whole
        pickle.load(sys.stdin.buffer)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("begun", [False, True])
def test_a_process_killed_in_the_midst_of_an_answer_is_a_dead_process(begun, blamed, monkeypatch):
    half = pickle.dumps(np.zeros(1000, np.uint8))[:500]
    answers = [pickle.dumps(crash_guard.READY), half] if begun else [half]
    monkeypatch.setattr(crash_guard, "_START", DIES_ANSWERING.format(answers=answers))
    error, what = (BadImage, "SIGKILL") if begun else (DaskImageIngestError, "does not start")
    with DecodeSubprocess(DecodeSpec()) as process, pytest.raises(error, match=what):
        process.decode(None, b"image", None)
    assert not blamed


@pytest.mark.more
@pytest.mark.newest
def test_an_error_of_a_transform_is_raised_from_the_guarded_process(photos):
    def to_float(images):
        from nvidia.dali import fn, types

        return fn.cast(images, dtype=types.FLOAT)

    encoded = photos[0].encoded
    with (
        DecodeSubprocess(DecodeSpec(transform=to_float)) as guard,
        pytest.raises(dii.ArgumentError, match="FLOAT"),
    ):
        guard.decode(read_header(encoded, 10**9), encoded, unknown(0))


# Without a look by DALI's own parser, one such shard in three kills the process.
READER = """
import sys
import dask_image_ingest as dii

for _ in range(12):
    frame = dii.read_webdataset_images(sys.argv[1], backend="pandas").compute(
        scheduler="synchronous"
    )
    assert frame.image.notna().sum() >= 64, frame.error.dropna().tolist()
"""


@pytest.mark.newest
def test_an_image_that_the_parser_of_dali_refuses_does_not_reach_it(tmp_path):
    good = save(picture(), "WEBP", quality=80)
    exif = struct.pack("<HHIHHII", 0x4949, 42, 8, 0, 0, 0, 0)
    bad = bytearray(webp_with_exif(good, *picture().size, exif))
    # The chunk claims more bytes than the file has.
    at = bad.index(b"EXIF") + 4
    bad[at : at + 4] = struct.pack("<I", 1 << 15)
    assert read_header(bytes(bad), 1 << 22).error is None
    assert parsed_shape(np.frombuffer(bad, np.uint8)) is None
    files = {"bad.webp": bytes(bad)} | {f"{number:02}.webp": good for number in range(64)}
    path = write_tar(tmp_path / "a.tar", files)
    finished = run_python(READER, path)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.more
def test_the_guarded_process_of_a_killed_worker_ends_without_a_word():
    command, pipe = [sys.executable, "-c", crash_guard._START], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        child.stdout.close()
        sent = pickle.dumps(sys.path) + pickle.dumps(crash_guard.dumps(DecodeSpec(device="cpu")))
        assert child.communicate(sent)[1] == b""
    assert child.returncode == 1
