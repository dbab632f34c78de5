"""A scan skips by a setting; a stalled answer is waited for by what was measured."""

from __future__ import annotations

import io
import subprocess
import tarfile

import dask
import numpy as np
import pytest
from faulty_server import faulty_server
from tars import add, random_tar, samples_of, tar

from dask_image_ingest.storage import open_shard
from dask_image_ingest.storage.fetch import LatencyStats
from dask_image_ingest.tar import ShardIndex, index_tar

RNG = np.random.default_rng(15)


def test_a_server_that_answered_fast_is_not_waited_for_long():
    known = LatencyStats()
    assert [known.stall_timeout(20.0, stalls) for stalls in range(4)] == [2.5, 5, 10, 20]
    known.add(0.03)
    assert known.stall_timeout(20.0, 0) == 1.0
    for _ in range(16):
        known.add(0.03)
    assert [known.stall_timeout(20.0, stalls) for stalls in range(6)] == [0.5, 1, 2, 4, 8, 16]
    assert known.stall_timeout(0.3, 0) == 0.3
    far = LatencyStats()
    for _ in range(16):
        far.add(0.4)
    assert far.stall_timeout(20.0, 0) == pytest.approx(6.0)


LARGE = tar(
    {f"{i:03d}.{e}": RNG.bytes(n) for i in range(60) for e, n in (("jpg", 600_000), ("txt", 9))}
)


@pytest.mark.parametrize(("skip", "skips"), [("auto", False), ("50 kB", True)])
def test_a_scan_skips_members_that_are_larger_than_the_setting(skip, skips):
    with (
        faulty_server(files={"/x.tar": LARGE}) as server,
        dask.config.set({"image-ingest.remote.skip": skip}),
        open_shard(f"{server.url}/x.tar") as content,
    ):
        assert index_tar(content).samples == index_tar(LARGE).samples
        if skips:
            assert server.sent < len(LARGE) / 10
        else:
            assert len(LARGE) * 0.9 < server.sent < len(LARGE) * 1.05
            assert server.counts["GET"] < 45


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["0", "auto", "1 GiB"])
def test_the_choice_can_be_set_and_changes_no_answer(skip, tmp_path):
    """Tars with PAX and GNU names, sparse members, odd types, whatever else a tar may hold."""
    tars = {f"/{seed}.tar": random_tar(seed) for seed in range(12)}
    tars["/pax.tar"] = long_names()
    for tar_format in ("gnu", "posix"):
        tars[f"/sparse-{tar_format}.tar"] = with_holes(tmp_path, tar_format)
    with faulty_server(files=tars) as server, dask.config.set(settings(skip)):
        for name, stored in tars.items():
            with open_shard(server.url + name) as content:
                remote, local = index_tar(content), index_tar(stored)
                assert told(remote) == told(local), name
                assert bool(local.sparse) == name.startswith("/sparse")
                assert samples_of(content) == samples_of(stored)


def told(index: ShardIndex) -> tuple:
    names = ("samples", "sparse", "damage", "interleaved", "repeated", "members", "pax")
    return tuple(getattr(index, name) for name in names)


def settings(skip: str) -> dict[str, str]:
    small = {"head": "1 KiB", "request-size": "16 KiB", "skip": skip}
    return {f"image-ingest.remote.{name}": value for name, value in small.items()}


def with_holes(folder, tar_format: str) -> bytes:
    """Files with holes among others, by GNU tar."""
    for number in range(10):
        with (folder / f"{number}.jpg").open("wb") as file:
            for part in range(4):
                file.seek(part * 200_000)
                file.write(RNG.bytes(20_000))
        (folder / f"{number}.txt").write_bytes(b"t")
    names = [f"{number}.{e}" for number in range(10) for e in ("jpg", "txt")]
    command = ["tar", "-C", str(folder), "--sparse", "--hole-detection=raw"]
    command += [f"--format={tar_format}", "-cf", "-", *names]
    return subprocess.run(command, check=True, capture_output=True).stdout


def long_names() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(20):
            name = f"{'long/' * 40}{number}"
            add(archive, f"{name}.jpg", RNG.bytes(60_000), pax_headers={"comment": "ä" * 50})
            add(archive, f"{name}.txt", b"t")
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["0", "256 KiB", "128 MiB"])
def test_what_has_no_room_in_memory_is_not_fetched_twice(memory):
    small = {"cache": memory, "read-ahead": "1 MiB", "request-size": "128 KiB"}
    limits = dask.config.set({f"image-ingest.remote.{name}": size for name, size in small.items()})
    data = tar({f"{i:03d}.{e}": RNG.bytes(40_000) for i in range(150) for e in ("jpg", "txt")})
    with faulty_server(files={"/x.tar": data}) as server, limits:
        with open_shard(f"{server.url}/x.tar") as content:
            samples = index_tar(content).samples
            content.prefetch([span for s in samples for span in ends(s)])
            assert samples_of(content) == samples_of(data)
            assert content._cache._used_bytes <= max(1 << 20, int(memory.split()[0]) << 20)
        assert server.sent < 1.1 * len(data)


def ends(sample):
    return [(offset, offset + size) for offset, size in sample.members.values()]
