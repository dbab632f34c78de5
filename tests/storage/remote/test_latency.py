"""What requests have cost decides whether a walk skips, and how long a server is waited for."""

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
from dask_image_ingest.storage.remote import fetch, reader
from dask_image_ingest.storage.remote.fetch import LatencyStats
from dask_image_ingest.tar import index_tar

RNG = np.random.default_rng(15)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answers(
    paces: LatencyStats, clock: Clock, latency: float, rate: float, beside: int, told: bool = True
):
    """As many requests side by side as that, of a MB each."""
    nbytes = 1_000_000
    watched = [paces.watch() for _ in range(beside)]
    requests = [each.__enter__() for each in watched]
    clock.now += latency
    for request in requests:
        if told:
            request.take(b"")
    clock.now += nbytes / rate
    for request, each in zip(requests, watched, strict=True):
        request.take(bytes(nbytes))
        each.__exit__(None, None, None)


def test_leaving_out_pays_beyond_what_comes_in_the_time_of_an_answer():
    clock = Clock()
    paces = LatencyStats(16, clock)
    assert paces.break_even() is None
    answers(paces, clock, latency=0.03, rate=20e6, beside=16)
    assert paces.break_even() == pytest.approx(0.03 * 20e6 * 16)
    # Where the link is the limit, those side by side share it; one alone says nothing of that.
    slow = LatencyStats(16, clock)
    answers(slow, clock, latency=0.03, rate=1e6 / 16, beside=16)
    for _ in range(100):
        answers(slow, clock, latency=0.03, rate=1e6, beside=1)
    assert slow.break_even() == pytest.approx(0.03 * 1e6)


def test_answers_that_come_at_once_are_told_by_their_size():
    """As those of fsspec's file systems."""
    clock = Clock()
    paces = LatencyStats(16, clock)
    with paces.watch() as request:
        clock.now += 0.03
        request.take(bytes(1000))
    answers(paces, clock, latency=0.03, rate=20e6, beside=16, told=False)
    assert paces.break_even() == pytest.approx(0.03 * 20e6 * 16)


def test_a_server_that_answered_fast_is_not_waited_for_long():
    clock = Clock()
    paces = LatencyStats(16, clock)
    assert [paces.stall_timeout(20.0, stalls) for stalls in range(4)] == [2.5, 5, 10, 20]
    answers(paces, clock, latency=0.03, rate=20e6, beside=1)
    assert paces.stall_timeout(20.0, 0) == 1.0
    answers(paces, clock, latency=0.03, rate=20e6, beside=16)
    assert [paces.stall_timeout(20.0, stalls) for stalls in range(6)] == [0.5, 1, 2, 4, 8, 16]
    assert paces.stall_timeout(0.3, 0) == 0.3
    far = LatencyStats(16, clock)
    answers(far, clock, latency=0.4, rate=20e6, beside=16)
    assert far.stall_timeout(20.0, 0) == pytest.approx(6.0)


LARGE = tar(
    {f"{i:03d}.{e}": RNG.bytes(n) for i in range(60) for e, n in (("jpg", 600_000), ("txt", 9))}
)


class Known(LatencyStats):
    """What is measured on a busy machine is no test: the figures of a link, whatever it does."""

    def break_even(self) -> float | None:
        return self.bytes_per_answer


@pytest.mark.parametrize(("link", "skips"), [(9_600_000, False), (50_000, True)])
def test_a_walk_skips_where_the_link_is_the_limit(link, skips, monkeypatch):
    """At 30 ms and 20 MB/s on each of 16 connections; where these share 1.7 MB/s."""
    known = Known(16)
    known.bytes_per_answer = link
    monkeypatch.setattr(reader, "latency_stats_of", lambda url, connections: known)
    with (
        faulty_server(files={"/x.tar": LARGE}) as server,
        open_shard(f"{server.url}/x.tar") as content,
    ):
        assert index_tar(content).samples == index_tar(LARGE).samples
        if skips:
            assert server.sent < len(LARGE) / 10
        else:
            assert len(LARGE) * 0.9 < server.sent < len(LARGE) * 1.05
            assert server.counts["GET"] < 45


@pytest.mark.slow
def test_a_walk_begins_with_large_requests_where_the_last_one_left_out_nothing(monkeypatch):
    known = Known(16)
    known.bytes_per_answer = 9_600_000
    monkeypatch.setattr(reader, "latency_stats_of", lambda url, connections: known)
    requests, sent = [], []
    with (
        faulty_server(files={"/x.tar": LARGE}) as server,
        dask.config.set({"image-ingest.remote.read-ahead": "8 MiB"}),
    ):
        for link in (9_600_000, 9_600_000, 50_000, 9_600_000):
            known.bytes_per_answer = link
            server.reset()
            with open_shard(f"{server.url}/x.tar") as content:
                assert index_tar(content).samples == index_tar(LARGE).samples
            requests.append(server.counts["GET"])
            sent.append(server.sent)
    assert requests[1] < requests[0] - 5
    assert requests[3] == requests[0]
    assert max(sent) < len(LARGE) * 1.05
    assert sent[2] < len(LARGE) / 2


def test_requests_are_measured_as_they_are_made():
    fetch._latency_stats.clear()
    with (
        faulty_server(files={"/x.tar": LARGE}, latency=0.05) as server,
        open_shard(f"{server.url}/x.tar") as content,
    ):
        assert content[:] == LARGE
        seen = fetch.latency_stats_of(server.url, 16)
        assert seen.break_even() > 0
        assert min(seen._latencies) >= 0.05


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
                assert remote == local, name
                assert bool(local.sparse) == name.startswith("/sparse")
                assert samples_of(content) == samples_of(stored)


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
            assert content._cache._used <= max(1 << 20, int(memory.split()[0]) << 20)
        assert server.sent < 1.1 * len(data)


def ends(sample):
    return [(offset, offset + size) for offset, size in sample.members.values()]
