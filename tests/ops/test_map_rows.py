"""``map_rows``: functions that wait, for many rows at a time, with retries and a journal."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import email.utils
import functools
import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import aiohttp
import dask
import distributed
import fsspec
import numpy as np
import pandas as pd
import pytest
from model_server import model_server
from photo_shards import write_tar
from processes import start, until
from small_frames import lazy_frame, small_frame

import dask_image_ingest as dii
from dask_image_ingest.ops.map_rows import pause_before_retry


@pytest.fixture
def frame():
    return small_frame(range(40), (2, 3, 3)).rename(columns={"key": "__key__"})


class Waits:
    """A result of every kind, after a while that differs from row to row."""

    def __init__(self):
        self.now = self.most = 0

    async def __call__(self, image, key):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001 * (key * 7 % 10))
        self.now -= 1
        assert isinstance(image, np.ndarray)
        assert type(key) is int
        assert (image == key).all()
        image[:] = 0  # it is a copy
        if key % 5 == 0:
            return None
        return {
            "s": f"row {key}",
            "f": float("nan") if key % 4 == 0 else key / 2,
            "i": np.int64(key),
            "v": np.full(2, key),
            "l": ["a"] * (key % 3),
            "d": {"x": key},
            "p": np.full((1, key, 3), key, "uint8"),
        }


OUTPUTS = {
    "s": "string",
    "f": "float32",
    "i": "int64",
    "v": "float32[2]",
    "l": "list<string>",
    "d": "struct<x: int64>",
    "p": "image",
}


def check(made):
    keys = made["__key__"].tolist()
    assert keys == list(range(len(made)))
    null = [key % 5 == 0 for key in keys]
    assert made["s"].isna().tolist() == null
    assert made["f"].isna().tolist() == [key % 5 == 0 or key % 4 == 0 for key in keys]
    for key, row in zip(keys, made.itertuples(), strict=True):
        if key % 5:
            assert (row.s, row.i, row.d) == (f"row {key}", key, {"x": key})
            assert row.v.tolist() == [key, key]
            assert list(row.l) == ["a"] * (key % 3)
    images = made.images["p"].arrays()
    assert [image is None for image in images] == null
    assert all(image.shape == (1, key, 3) for key, image in enumerate(images) if key % 5)


def test_a_dict_that_is_a_struct_is_not_taken_for_the_outputs(frame):
    for type_, given, expected in [
        ("struct<c: int64, d: string>", {"c": 1}, {"c": 1, "d": None}),
        ("struct<c: struct<x: int64>>", {"c": {"x": 1}}, {"c": {"x": 1}}),
        ("int64", {"c": 1}, 1),
    ]:
        one = frame.iloc[:1].images.map_rows(lambda image, v=given: v, {"c": type_})
        got = one["c"].iloc[0]
        assert (None if got is pd.NA else got) == expected, (type_, given)


def test_rows_have_their_results_in_order_and_so_many_wait_at_a_time(frame):
    function = Waits()
    made = frame.images.map_rows(function, OUTPUTS, inputs=["image", "__key__"], concurrency=7)
    check(made)
    assert function.most == 7
    parts = [frame.iloc[start : start + 10] for start in range(0, 40, 10)]
    lazy = lazy_frame(parts).images.map_rows(
        Waits, OUTPUTS, inputs=["image", "__key__"], concurrency=7
    )
    with dask.config.set(scheduler="threads", num_workers=4):
        made = lazy.compute()
    check(made)
    assert made.dtypes.to_dict() == lazy.dtypes.to_dict()


def test_the_limit_is_that_of_the_process_not_of_a_partition():
    function = Waits()
    parts = [small_frame(range(20)).rename(columns={"key": "__key__"}) for _ in range(4)]
    lazy = lazy_frame(parts).images.map_rows(
        function, OUTPUTS, inputs=["image", "__key__"], concurrency=5
    )
    with dask.config.set(scheduler="threads", num_workers=4):
        lazy.compute()
    assert function.most == 5


def test_a_function_that_blocks_is_called_in_threads(frame):
    barrier = threading.Barrier(20, timeout=60)

    def blocks(image):
        barrier.wait()
        return int(image.flat[0])

    made = frame.images.map_rows(blocks, {"o": "int64"}, concurrency=20)
    assert made["o"].tolist() == list(range(40))


@pytest.mark.parametrize("kind", ["function", "partial", "object", "class"])
def test_async_functions_of_every_kind_are_awaited(frame, kind):
    async def function(add, image):
        return int(image.flat[0]) + add

    class Adds:
        def __init__(self, add=1):
            self.add = add
            asyncio.get_running_loop() if kind == "class" else None  # clients need one

        async def __call__(self, image):
            return int(image.flat[0]) + self.add

    async def plain(image):
        return await function(1, image)

    fn = {
        "function": plain,
        "partial": functools.partial(function, 1),
        "object": Adds() if kind == "object" else None,
        "class": Adds,
    }[kind]
    assert frame.images.map_rows(fn, {"o": "int64"})["o"].tolist() == list(range(1, 41))
    with pytest.raises(dii.ArgumentError, match="map_rows waits"):
        frame.images.map_batches(fn, {"o": "int64"})


class Temporary(Exception):
    def __init__(self, status, headers=None):
        super().__init__(f"status {status}")
        self.status_code = status
        self.headers = headers or {}


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("dask_image_ingest.ops.map_rows._FIRST_PAUSE", 0.001)


def test_temporary_failures_are_tried_again_and_others_not(frame, no_pauses):
    calls = Counter()

    async def busy(key):
        calls[key] += 1
        if key % 4 == 1 and calls[key] <= 3:
            errors = [Temporary(429), Temporary(503), TimeoutError(), ConnectionResetError()]
            raise errors[key // 10]
        if key == 8:
            raise Temporary(404)
        if key == 12:
            raise Temporary(500)
        return key

    made = frame.images.map_rows(
        busy, {"o": "int64"}, inputs=["__key__"], retries=3, errors="null", concurrency=4
    )
    want = [None if key in (8, 12) else key for key in range(40)]
    assert [None if pd.isna(value) else value for value in made["o"]] == want
    name = "test_temporary_failures_are_tried_again_and_others_not.<locals>.busy"
    assert made["error"].dropna().to_dict() == {
        8: f"function-failed: {name}: Temporary: status 404",
        12: f"function-failed: {name}: Temporary: status 500 (4 tries)",
    }
    assert calls == {k: 4 if k == 12 or k % 4 == 1 else 1 for k in range(40)}
    with pytest.raises(dii.FunctionError, match=r"map_rows: .*busy fails for sample (8|12): Temp"):
        frame.images.map_rows(busy, {"o": "int64"}, inputs=["__key__"], retries=1)


def test_a_server_that_asks_to_wait_is_waited_for():
    later = email.utils.formatdate(time.time() + 100)
    assert pause_before_retry(Temporary(429, {"Retry-After": "7"}), 1) == 7
    assert pause_before_retry(Temporary(503, {"retry-after": "2.5"}), 1) == 2.5
    assert 95 < pause_before_retry(Temporary(429, {"Retry-After": later}), 1) < 101
    assert pause_before_retry(Temporary(429, {"Retry-After": "86400"}), 1) is None
    assert pause_before_retry(Temporary(400, {"Retry-After": "1"}), 1) is None
    assert pause_before_retry(ValueError("no"), 1) is None
    assert 0.25 <= pause_before_retry(TimeoutError(), 1) <= 0.5
    assert 15 <= pause_before_retry(TimeoutError(), 100) <= 30
    wrapped = ValueError("of a client")
    wrapped.__cause__ = ConnectionRefusedError()
    assert pause_before_retry(wrapped, 1)


@pytest.mark.parametrize(
    ("error", "caught"),
    [(KeyboardInterrupt, KeyboardInterrupt), (MemoryError, dii.FunctionError),
     (ImportError, dii.FunctionError)],
)  # fmt: skip
@pytest.mark.parametrize("blocks", [True, False])
def test_an_error_that_is_no_row_s_is_raised_and_the_next_call_works(frame, error, caught, blocks):
    def fails(key):
        if key == 3:
            raise error
        return key

    async def waits(key):
        return fails(key)

    with pytest.raises(caught):
        frame.images.map_rows(
            fails if blocks else waits, {"o": "int64"}, inputs=["__key__"], errors="null"
        )
    check(frame.images.map_rows(Waits(), OUTPUTS, inputs=["image", "__key__"]))


def test_a_wrong_result_is_named_and_costs_its_row_unless_all_are(frame):
    async def wrong(key):
        return "text" if key in bad else key

    bad = [0, 5, 39]
    with pytest.raises(dii.ArgumentError, match=r"^map_rows: .*wrong, called with sample [05]\)"):
        frame.images.map_rows(wrong, {"o": "int64"}, inputs=["__key__"])
    made = frame.images.map_rows(wrong, {"o": "int64"}, inputs=["__key__"], errors="null")
    assert made.index[made["o"].isna()].tolist() == bad
    assert made["error"].dropna().str.contains(r"wrong: gave \['text'\]").all()
    bad = range(40)

    async def other(key):
        return await wrong(key)

    for rows in (frame, frame.iloc[:3]):
        with pytest.raises(dii.ArgumentError, match=r"^map_rows: .*called with sample \d+\)"):
            rows.images.map_rows(other, {"o": "int64"}, inputs=["__key__"], errors="null")


@pytest.mark.parametrize("error", [ConnectionRefusedError(), Temporary(503), Temporary(401)])
def test_a_server_that_has_gone_stops_the_job_and_costs_no_rows(tmp_path, no_pauses, error):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 4, 15)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    asked, gone = Counter(), False

    async def caption(key):
        asked[key] += 1
        if gone and len(asked) > 25:
            raise error
        return f"of {key}"

    lengths = ddf.images.map_rows(
        caption, {"o": "string"}, inputs=["__key__"], errors="null", retries=1, concurrency=3
    )
    gone = True
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.raises(dii.FunctionError, match=r"map_rows: .* 5 rows failed in a row: when "),
    ):
        dii.checkpoint(lengths, str(tmp_path / "out"), version="1")
    gone = False
    asked.clear()
    stored = dii.checkpoint(lengths, str(tmp_path / "out"), version="1").compute()
    assert set(asked.values()) == {1}
    assert len(asked) == 60 - 25
    assert stored["o"].tolist() == [f"of {key}" for key in stored["__key__"]]


class Refused(Exception):
    """An error of which nothing tells that the server has gone."""


def test_failures_after_which_no_row_was_answered_are_not_stored(tmp_path):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 6, 10)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    asked, last = [], 60

    def blocks(key):
        asked.append(key)
        if len(asked) > last:
            raise Refused from KeyError(key)
        return f"of {key}"

    async def waits(key):
        return blocks(key)

    def checkpoint(function, concurrency, out):
        named = ddf.images.map_rows(
            function, {"o": "string"}, inputs=["__key__"], errors="null", concurrency=concurrency
        )
        return dii.checkpoint(named, out, version="1").compute()

    variants = [
        (1, blocks, 55, f"{tmp_path}/1"),
        (4, waits, 0, f"{tmp_path}/2"),
        (16, blocks, 23, f"{tmp_path}/3"),
        (4, waits, 56, f"memory://{tmp_path}/4"),
    ]
    for concurrency, function, answered, out in variants:
        asked.clear()
        last = answered
        with dask.config.set(scheduler="synchronous"):
            for _ in range(2):  # the server is away in the second run, too
                with pytest.raises(dii.FunctionError, match=r"Refused.* \d+ rows failed in a row"):
                    checkpoint(function, concurrency, out)
            done = set(asked[:answered])
            asked.clear()
            last = 60
            stored = checkpoint(function, concurrency, out)
        assert set(asked) >= {key for key in stored["__key__"] if key not in done}
        assert len(set(asked) & done) <= 1  # asked again, to see that the server answers
        assert stored["o"].tolist() == [f"of {key}" for key in stored["__key__"]]


def test_failures_before_others_are_answered_are_stored_and_few_at_the_end(tmp_path):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 6, 10)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    for number, (concurrency, bad) in enumerate(
        [(1, ["050009"]), (4, ["000000", "010009", *(f"0300{n:02}" for n in range(10)), "050009"])]
    ):

        async def refuses(key, bad=bad):
            if key in bad:
                raise Refused(key)
            return f"of {key}"

        named = ddf.images.map_rows(
            refuses, {"o": "string"}, inputs=["__key__"], errors="null", concurrency=concurrency
        )
        with dask.config.set(scheduler="synchronous"):
            dii.checkpoint(named, f"{tmp_path}/{number}", version="1")
            stored = dii.checkpoint(named, f"{tmp_path}/{number}", version="1").compute()
        assert stored["__key__"][stored["error"].notna()].tolist() == bad
        assert stored["o"].isna().sum() == len(bad)
        assert not list((tmp_path / str(number)).glob("_staging/*"))


def test_a_job_of_which_no_row_is_answered_is_not_stored(tmp_path):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 3, 1)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]

    def refuses(key):
        raise Refused

    named = ddf.images.map_rows(refuses, {"o": "string"}, inputs=["__key__"], errors="null")
    for _ in range(2):
        with pytest.raises(
            dii.FunctionError, match=r"^map_rows: .* sample '0\d0000': Refused: \. \d rows failed"
        ):
            dii.checkpoint(named, str(tmp_path / "out"), version="1")
    assert named.compute()["error"].str.endswith("Refused: ").all()


class Answers(Exception):
    """An error with the attributes that a client gives its own."""

    def __init__(self, *args, **attributes):
        super().__init__(*args)
        vars(self).update(attributes)


def test_a_server_that_has_gone_is_seen_through_every_client():
    away = ConnectionResetError(104, "reset")
    three = Refused("c")
    three.__cause__ = Refused("b")
    three.__cause__.__context__ = away
    three.__cause__.__suppress_context__ = True
    unavailable = SimpleNamespace(name="UNAVAILABLE", value=(14, "unavailable"))
    metadata = {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "7"}}
    throttled = Answers(response={"Error": {}, "ResponseMetadata": metadata})
    for gone in (
        three,
        Refused(Refused("Connection aborted.", away)),
        Refused(Answers("url", reason=away)),
        ExceptionGroup("tasks", [ValueError(), away]),
        Answers(code=lambda: unavailable),
        Answers(status=lambda: "StatusCode.UNAVAILABLE"),
        Answers(response=SimpleNamespace(status_code=503)),
        throttled,
        type("ReadTimeoutError", (Exception,), {})(),
        type("ProtocolError", (Exception,), {})("Response ended prematurely"),
    ):
        assert pause_before_retry(gone, 1), gone
    assert pause_before_retry(throttled, 1) == 7
    refused = Answers(code=lambda: SimpleNamespace(name="INVALID_ARGUMENT", value=(3, "")))
    for of_a_row in (
        refused,
        Answers(response={"ResponseMetadata": {"HTTPStatusCode": 400}}),
        Answers(status_code=404, reason=away),  # it has answered in the end
        Answers(code="invalid_image", status=lambda key: key),
        KeyError("x"),
    ):
        assert pause_before_retry(of_a_row, 1) is None, of_a_row


def test_failures_in_a_row_that_are_the_rows_own_stop_nothing(frame, no_pauses):
    async def refuses(key):
        if key < 35:
            raise Temporary(400)
        return key

    made = frame.images.map_rows(refuses, {"o": "int64"}, inputs=["__key__"], errors="null")
    assert made["o"].isna().sum() == 35


class OtherError(BaseException):
    """As trio's ``Cancelled``."""


def test_every_exception_of_a_function_has_its_outcome_and_none_hangs(frame):
    raised = [StopIteration, StopAsyncIteration, asyncio.CancelledError,
              concurrent.futures.CancelledError, concurrent.futures.BrokenExecutor]  # fmt: skip
    ending = [SystemExit, GeneratorExit, OtherError]

    def fails(key):
        if key == 5:
            raise error
        return key

    async def waits(key):
        return fails(key)

    def gives_awaitable(key):
        return waits(key)

    async def cancels_itself(key):
        if key == 5:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        return key

    async def cancels_itself_and_ends(key):
        return asyncio.current_task().cancel() if key == 5 else key

    async def fails_inside(key):
        return (await asyncio.gather(waits(key), asyncio.sleep(0, key)))[1]

    class FailsToBegin:
        def __init__(self):
            raise error

        def __call__(self, key):
            raise AssertionError

    frame = frame.iloc[:8]

    def mapped(function, errors):
        return frame.images.map_rows(function, {"o": "int64"}, inputs=["__key__"], errors=errors)

    def batches(keys):
        return [fails(key) for key in keys]

    for error in (*raised, *ending):
        always = [cancels_itself, cancels_itself_and_ends] if error is StopIteration else []
        inside = [fails_inside] if error in raised else []
        for function in (fails, waits, gives_awaitable, *inside, *always):
            with pytest.raises(dii.FunctionError, match=r"fails for sample 5: \w+: "):
                mapped(function, "raise")
            if error in ending:
                with pytest.raises(dii.FunctionError, match=f"sample 5: {error.__name__}: "):
                    mapped(function, "null")
            else:
                made = mapped(function, "null")
                assert made["error"].dropna().index.tolist() == [5]
                assert made["o"].isna().sum() == 1
        with pytest.raises(dii.FunctionError, match="FailsToBegin can't be instantiated"):
            mapped(FailsToBegin, "null")
        for errors in ("raise", "null")[: 1 if error in raised else 2]:
            with pytest.raises(dii.FunctionError, match=f"{error.__name__}: "):
                frame.images.map_batches(batches, {"o": "int64"}, inputs=["__key__"], errors=errors)


def test_a_function_runs_in_the_context_of_its_task(frame):
    variable = contextvars.ContextVar("variable")

    def blocks(key):
        return variable.get() + key

    async def waits(key):
        return blocks(key)

    variable.set(100)
    for function in (blocks, waits):
        made = frame.images.map_rows(function, {"o": "int64"}, inputs=["__key__"])
        assert made["o"].tolist() == [*range(100, 140)]


def _address(key):
    return distributed.get_worker().address


class HoldsALock(Exception):
    def __init__(self, text, number):
        super().__init__(text)
        self.lock = threading.Lock()


def _fails_with_a_lock(key):
    try:
        raise HoldsALock("no", 3)
    except HoldsALock as error:
        raise ValueError("not this one") from error


@pytest.mark.slow
def test_on_a_cluster_a_function_knows_its_worker_and_its_errors_arrive(client):
    parts = [small_frame(range(3)).rename(columns={"key": "__key__"})]
    images = lazy_frame(parts).images
    made = images.map_rows(_address, {"o": "string"}, inputs=["__key__"]).compute()
    assert set(made["o"]) <= set(client.scheduler_info()["workers"])
    failing = images.map_rows(_fails_with_a_lock, {"o": "string"}, inputs=["__key__"])
    with pytest.raises(dii.FunctionError, match=r"fails for sample .*: not this one") as told:
        failing.compute()
    assert "not this one" in str(told.value.__cause__)


class Caption:
    """A caption from a server."""

    def __init__(self, url):
        self.url = url

    async def __call__(self, key):
        body = {"model": "mock", "messages": [{"role": "user", "content": f"{key}"}]}
        # A session of the instance would be closed by nobody: the process keeps the instance.
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{self.url}/chat/completions", json=body) as answer,
        ):
            return (await answer.json())["choices"][0]["message"]["content"]


def test_a_server_that_fails_now_and_then_costs_no_row(no_pauses):
    rows = pd.DataFrame({"key": range(600)})
    with model_server(latency=0.2, errors=0.05) as server:
        made = rows.images.map_rows(
            functools.partial(Caption, server.url),
            {"caption": "string"},
            inputs=["key"],
            concurrency=64,
            retries=10,
        )
        assert made["caption"].tolist() == [f"seen: {key}" for key in range(600)]
        assert server.most_waiting == 64
        assert len(server.prompts) > 600


def shards_of_keys(folder, shards, samples):
    for shard in range(shards):
        members = {f"{shard:02}{n:04}.jpg": b"-" for n in range(samples)}
        write_tar(folder / f"{shard}.tar", members)
    return folder


def killed_and_continued(tmp_path, latency, shards, samples, concurrency, kill_after):
    """Requests of a first run that is killed, and of a second one that goes on."""
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", shards, samples)
    log, out = tmp_path / "log", tmp_path / "out"
    log.touch()
    server = start("model_server.py", latency, 0.05, log)
    try:
        arguments = ("killed_calls.py", server.stdout.readline().strip(), folder, out, concurrency)
        first = start(*arguments)
        until(lambda: len(log.read_text().split()) >= kill_after or first.poll() is not None)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        before = log.read_text().split()
        second = start(*arguments)
        _, errors = second.communicate(timeout=280)
        assert second.returncode == 0, errors
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    return before, log.read_text().split()[len(before) :], out


def check_captions(out, shards, samples):
    files = sorted(out.glob("*.parquet"))
    made = pd.concat(pd.read_parquet(file) for file in files).sort_values("__key__")
    keys = [f"{shard:02}{n:04}" for shard in range(shards) for n in range(samples)]
    assert made["__key__"].tolist() == keys
    assert made["caption"].tolist() == [f"seen: {key}" for key in keys]
    assert not (out / "_staging").exists()


@pytest.mark.slow
def test_a_killed_checkpoint_repeats_at_most_what_was_waiting(tmp_path):
    before, after, out = killed_and_continued(tmp_path, 0.05, 2, 150, 16, 150)
    check_captions(out, 2, 150)
    failed = len(before) + len(after) - len(set(before) | set(after))
    assert len(set(before) & set(after)) <= 16, (len(before), len(after), failed)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_of_one_second_is_asked_sixty_times_a_second(tmp_path):
    began = time.monotonic()
    before, after, out = killed_and_continued(tmp_path, 1.0, 2, 1500, 64, 1500)
    seconds = time.monotonic() - began
    check_captions(out, 2, 1500)
    repeated = len(set(before) & set(after))
    print(f"{len(before) + len(after)} requests in {seconds:.0f} s, {repeated} of rows repeated")
    assert repeated <= 64


@pytest.mark.parametrize("every", [0.0, 1000.0])
def test_a_killed_checkpoint_in_an_object_store_keeps_the_rows_written(
    tmp_path, monkeypatch, every, caplog
):
    monkeypatch.setattr("dask_image_ingest.ops.row_journal._WRITTEN_EVERY", every)
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 3, 10)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    asked, store = [], fsspec.filesystem("memory").store
    url = f"memory://{tmp_path}"
    at_the_kill = {}

    async def name(key):
        if len(asked) == 25:
            at_the_kill.update({path: bytes(file.getbuffer()) for path, file in store.items()})
            raise RuntimeError("killed")
        asked.append(key)
        return f"of {key}"

    named = ddf.images.map_rows(name, {"o": "string"}, inputs=["__key__"], concurrency=1)
    with dask.config.set(scheduler="synchronous"), caplog.at_level("INFO", "dask_image_ingest"):
        with pytest.raises(dii.FunctionError):
            dii.checkpoint(named, url, version="1")
        first = [*asked]
        for path in [path for path in store if str(tmp_path) in path]:
            del store[path]
        for path, content in at_the_kill.items():
            if not path.endswith("_lock"):  # of a dead process: it would be watched for a while
                fsspec.filesystem("memory").pipe_file(path, content)
        asked[:] = [None]  # no kill
        stored = dii.checkpoint(named, url, version="1")
    again = [key for key in asked[1:] if key in first]
    assert again == ([] if every == 0 else first[20:25])
    assert stored["o"].compute().tolist() == [f"of {key}" for key in stored["__key__"].compute()]
    assert len(stored) == 30
    kept = ", and rows of 1 more" if every == 0 else ""
    assert caplog.messages[-1].endswith(f"2 of 3 partitions are stored{kept}")
    assert not [path for path in store if str(tmp_path) in path and "_staging" in path]


def test_an_interrupted_checkpoint_calls_no_more(tmp_path):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 2, 1000)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    asked = []

    async def name(key):
        asked.append(key)
        await asyncio.sleep(0.01)
        return f"of {key}"

    named = ddf.images.map_rows(name, {"o": "string"}, inputs=["__key__"], concurrency=4)

    def interrupt():
        until(lambda: len(asked) > 20)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's job in the background ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt), dask.config.set(scheduler="threads"):
            dii.checkpoint(named, str(tmp_path / "out"), version="1")
    finally:
        signal.signal(signal.SIGINT, handler)
    time.sleep(0.3)  # the calls that waited
    before = len(asked)
    time.sleep(0.5)
    assert 0 < len(asked) == before < 2000


@pytest.mark.parametrize("ending", [ValueError, RuntimeError])
def test_rows_that_fail_because_the_run_was_stopped_are_not_stored(tmp_path, ending):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 2, 20)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    stopped, failed = threading.Event(), Counter()

    def name(key):
        if key == "000005" and not failed:
            raise MemoryError
        if key > "010005" and not failed:
            assert stopped.wait(60)
        if key > "010005" and stopped.is_set() and not failed["over"]:
            failed[key] += 1
            raise ending("cannot schedule new futures after shutdown")  # as pools of the process do
        return f"of {key}"

    named = ddf.images.map_rows(
        name, {"o": "string"}, inputs=["__key__"], concurrency=64, errors="null"
    )
    with dask.config.set(scheduler="threads", num_workers=2):
        with pytest.raises(dii.FunctionError, match="MemoryError"):
            dii.checkpoint(named, str(tmp_path / "out"), version="1")
        stopped.set()
        time.sleep(0.5)
        assert not list((tmp_path / "out").glob("*.parquet"))
        failed["over"] += 1
        stored = dii.checkpoint(named, str(tmp_path / "out"), version="1").compute()
    assert stored["o"].tolist() == [f"of {key}" for key in stored["__key__"]]


@pytest.mark.rounds(2, nightly=50)
def test_a_torn_journal_gives_no_wrong_row(tmp_path, rng):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 1, 20)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")
    calls = []

    def query(until):
        async def name(key):
            calls.append(key)
            if len(calls) > until:
                raise RuntimeError("killed")
            return {"o": f"of {key}", "v": [int(key), 1]}

        return ddf[["__key__"]].images.map_rows(
            name, {"o": "string", "v": "int64[2]"}, inputs=["__key__"], concurrency=1
        )

    with pytest.raises(dii.FunctionError), dask.config.set(scheduler="synchronous"):
        dii.checkpoint(query(12), str(tmp_path / "out"), version="1")
    (journal,) = (tmp_path / "out" / "_staging").glob("*.rows")
    content = bytearray(journal.read_bytes())
    del content[rng.randrange(len(content)) :]
    for _ in range(rng.randrange(3)):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    journal.write_bytes(content)
    calls.clear()
    stored = dii.checkpoint(query(1000), str(tmp_path / "out"), version="1").compute()
    assert stored["o"].tolist() == [f"of {key}" for key in stored["__key__"]]
    assert [value.tolist() for value in stored["v"]] == [[int(k), 1] for k in stored["__key__"]]
    assert len(set(calls)) == len(calls)


def test_bad_arguments_are_told_at_once(frame):
    for bad in ({"concurrency": 0}, {"retries": -1}, {"errors": "drop"}, {"concurrency": 10**6}):
        with pytest.raises(dii.ArgumentError, match=next(iter(bad))):
            frame.images.map_rows(len, {"o": "int64"}, **bad)
    with pytest.raises(dii.ArgumentError, match="map_rows needs a function"):
        frame.images.map_rows(3, {"o": "int64"})


def test_other_limits_are_no_other_checkpoint(tmp_path):
    (tmp_path / "shards").mkdir()
    folder = shards_of_keys(tmp_path / "shards", 1, 5)
    ddf = dii.read_webdataset_images(str(folder / "*.tar"), backend="pandas")[["__key__"]]
    for concurrency, retries in ((1, 0), (8, 3)):
        lengths = ddf.images.map_rows(
            len, {"o": "int64"}, inputs=["__key__"], concurrency=concurrency, retries=retries
        )
        assert len(dii.checkpoint(lengths, str(tmp_path / "out"))) == 5
