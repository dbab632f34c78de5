"""What networks do to a shard that is read: tried again, or an error that says what to do."""

import functools
import threading
import warnings
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import dask
import numpy as np
import pytest
from faulty_server import FAILURES, KINDS, faulty_server
from forked_python import run_python
from processes import printed
from tars import COMPRESSIONS, samples_of, tar, webdataset_samples

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError, ShardError, ShardNotFoundError
from dask_image_ingest.storage import find_shards, open_shard

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(7)
FILES = {f"{i:03d}.{e}": RNG.bytes(9000) for i in range(150) for e in ("jpg", "txt")}
SHARD = tar(FILES)
OTHER = tar({name: content[::-1] for name, content in FILES.items()})

QUICK = {
    "image-ingest.remote.read-timeout": 0.3,
    "image-ingest.remote.request-size": "48 KiB",
    "image-ingest.remote.head": "16 KiB",
}


@pytest.fixture(autouse=True)
def quick():
    with dask.config.set(QUICK):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_every_third_answer_loses_and_changes_nothing(kind):
    with faulty_server(files={"/x.tar": SHARD}, rates={kind: 0.3}, stall=1.0, seed=3) as server:
        with open_shard(f"{server.url}/x.tar") as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        assert server.injected[kind] > 5
        # What came before a body broke off is not asked for again. A stall is told by the time, and
        # a busy machine has more of them than were made.
        if kind != "stall":
            assert server.sent < 1.3 * len(SHARD)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_all_kinds_at_once(compression):
    stored = COMPRESSIONS[compression](SHARD)
    rates = dict.fromkeys(KINDS, 0.05)
    with faulty_server(files={"/x.tar": stored}, rates=rates, seed=5) as server:
        with open_shard(f"{server.url}/x.tar") as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        assert sum(server.injected[kind] for kind in KINDS if kind != "delay") >= 5


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_fault_costs_one_request(compression):
    stored = COMPRESSIONS[compression](SHARD)
    rates = dict.fromkeys(FAILURES, 0.08)
    with faulty_server(files={"/x.tar": stored}, rates=rates, seed=5) as server:
        with open_shard(f"{server.url}/x.tar") as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        bad = sum(server.injected[kind] for kind in rates)
        assert bad >= 5
        clean = -(-len(stored) // (48 << 10)) + 20
        assert server.counts["GET"] <= clean + bad


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (404, ShardNotFoundError, "is not found"),
        (410, ShardNotFoundError, "410"),
        (401, ShardError, "401.*pass them in storage_options"),
        (403, ShardError, "403.*check the credentials.*signed URL may have expired"),
        (400, ShardError, "400"),
    ],
)
def test_what_will_not_get_better_is_an_error_at_once(status, error, told):
    with faulty_server() as server:
        url = f"{server.url}/{status}/x.tar"
        with pytest.raises(error, match=rf"{status}/x\.tar .*{told}"), open_shard(url):
            pass
        assert server.counts["GET"] == 1


def test_a_server_that_stays_away_is_given_up_in_time():
    with faulty_server(rates={"503": 1.0}) as server:
        limit = dask.config.set({"image-ingest.remote.retry-limit": "1s"})
        refused = pytest.raises(ShardError, match=r"x\.tar cannot be read: .*503.*tries")
        with limit, refused, open_shard(f"{server.url}/x.tar"):
            pass
        assert 2 <= server.counts["GET"] <= 8


@pytest.mark.parametrize("tags", [True, False])
def test_a_shard_that_is_replaced_is_an_error_and_never_a_mixture(tags):
    """Without tags by its size, which here is another one."""
    with faulty_server(files={"/x.tar": SHARD}, tags=tags) as server:
        changed = pytest.raises(ShardError, match=r"x\.tar has changed while it was read")
        with changed, open_shard(f"{server.url}/x.tar") as content:
            server.files["/x.tar"] = OTHER if tags else OTHER + bytes(10240)
            samples_of(content)


def test_a_server_without_ranges_sends_the_shard_once():
    with faulty_server(files={"/x.tar": SHARD}, ranges=False) as server:
        opened = open_shard(f"{server.url}/x.tar?signature=a%2Fb")
        with pytest.warns(UserWarning, match="ranges with whole files"), opened as content:
            assert samples_of(content) == webdataset_samples(SHARD)
        assert [(method, path) for method, path, _ in server.seen] == [
            ("GET", "/x.tar?signature=a%2Fb")
        ]


def test_a_server_without_ranges_is_warned_of_once(tmp_path):
    """The server of Python's standard library: it sends whole files."""
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(SHARD)
    serve = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        paths = f"http://user:secret@{host}/{{0..2}}.tar"
        with warnings.catch_warnings(record=True) as caught:  # others are of the random text
            warnings.simplefilter("always")
            rows = read_undecoded(paths)
        server.shutdown()
    assert len(rows) == 3 * len(webdataset_samples(SHARD))
    (told,) = [text for warning in caught if "ranges" in (text := str(warning.message))]
    assert f"http://{host} answers requests for ranges with whole files" in told
    assert "downloads all of its shard" in told
    assert "secret" not in told


def read_undecoded(paths):
    ddf = dii.read_webdataset_images(paths, backend="pandas", decode=False)
    return ddf.compute(scheduler="sync")


@pytest.mark.parametrize("size", [100, len(SHARD)])
def test_files_that_are_no_larger_than_what_is_asked_for_are_no_reason_to_warn(size):
    with (
        dask.config.set({"image-ingest.remote.head": len(SHARD)}),
        faulty_server(files={"/x.tar": SHARD[:size]}, ranges=False) as server,
        open_shard(f"{server.url}/x.tar") as content,
    ):
        assert len(content) == size


def test_an_empty_shard_is_read_as_one():
    with faulty_server(files={"/x.tar": b""}) as server, open_shard(f"{server.url}/x.tar") as none:
        assert len(none) == 0


def test_headers_are_sent_with_each_request():
    with faulty_server(files={"/x.tar": SHARD}) as server:
        for options in (
            {"headers": {"X-Who": "me"}},
            {"client_kwargs": {"headers": {"X-Who": "me"}}},
        ):
            with open_shard(f"{server.url}/x.tar", options) as content:
                content[:]
        assert {headers.get("X-Who") for _, _, headers in server.seen} == {"me"}


def test_listing_survives_faults_too():
    pytest.importorskip("aiohttp")
    files = {f"/{i}.tar": SHARD[:10240] for i in range(40)}
    rates = {"503": 0.1, "429": 0.1, "reset": 0.1}
    with faulty_server(files=files, rates=rates, seed=1) as server:
        shards = find_shards(f"{server.url}/{{0..39}}.tar")
        assert [shard.size for shard in shards] == [10240] * 40
        assert server.injected["503"]
        assert server.injected["429"]


def test_settings_that_make_no_sense_are_refused():
    for name, value in {"gap": "many", "connections": 0, "read-timeout": "x"}.items():
        wrong = dask.config.set({f"image-ingest.remote.{name}": value})
        refused = pytest.raises(ArgumentError, match=f"remote.{name}")
        with wrong, refused, open_shard("http://127.0.0.1:9/x.tar"):
            pass


def test_no_more_than_the_connections_that_were_set_are_used():
    with (
        faulty_server(files={"/x.tar": SHARD}, latency=0.01) as server,
        dask.config.set({"image-ingest.remote.connections": 5}),
        open_shard(f"{server.url}/x.tar") as content,
    ):
        server.together = 5
        assert content[:] == SHARD
        assert server.peak == 5


def test_threads_read_one_shard_at_once():
    with (
        faulty_server(files={"/x.tar": SHARD}) as server,
        dask.config.set(
            {"image-ingest.remote.cache": "256 KiB", "image-ingest.remote.read-ahead": "512 KiB"}
        ),
        open_shard(f"{server.url}/x.tar") as content,
    ):
        wrong = []

        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(100):
                start = int(rng.integers(len(SHARD)))
                stop = start + int(rng.integers(200_000))
                if content[start:stop] != SHARD[start:stop]:
                    wrong.append((start, stop))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


FORKED = """
import json, os, random, signal, sys
from dask_image_ingest.storage import open_shard
from faulty_server import faulty_server
data = random.Random(0).randbytes(1 << 20)
with faulty_server(files={"/x.tar": data}) as server:
    def read():
        with open_shard(server.url + "/x.tar") as content:
            return content[:] == data
    with open_shard(server.url + "/x.tar") as held:
        held[:]
        child = os.fork()
        if not child:
            signal.alarm(30)
            os._exit(0 if read() else 1)
        status = os.waitpid(child, 0)[1]
        print(json.dumps([status, read()]))
"""


def test_a_forked_process_reads_and_so_does_its_parent_after_it():
    finished = run_python(FORKED)
    assert finished.stdout.split() == ["[0,", "true]"], finished.stderr


EXIT = """
import json, threading, time
from dask_image_ingest.storage import open_shard
from faulty_server import faulty_server

with faulty_server(files={"/x.tar": bytes(1 << 22)}, stall=3.0) as server:
    with open_shard(server.url + "/x.tar") as content:
        server.rates["stall"] = 1.0
        content.prefetch([(1 << 20, 1 << 22)])
    print(json.dumps("closed"))
"""


@pytest.mark.slow
def test_a_process_ends_though_requests_stall():
    assert printed(EXIT) == "closed"
