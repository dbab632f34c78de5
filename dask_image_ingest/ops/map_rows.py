"""``map_rows``: a function that waits, such as for a server, called for several rows at once.

Calls of all partitions of a process run on one event loop in a thread of its own, at most
``concurrency`` at a time: coroutines on the loop, other functions in threads. In a checkpoint
results are written to a journal, so that a killed run does not repeat them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.computing import ANSWERED, count
from dask_image_ingest.frames import IMAGE, backend_of, get_backend
from dask_image_ingest.ops.batch_function import causes, may_be_of_a_row, waits
from dask_image_ingest.ops.map_batches import BatchMap, InputColumn, make_batch_map
from dask_image_ingest.ops.outputs import ResultError, checked_images, value_array
from dask_image_ingest.ops.row_journal import RowJournal, current_journal
from dask_image_ingest.typedefs import DataFrame, TypeLike
from dask_image_ingest.user_functions import stable_token

_Value = TypeVar("_Value")

# What a call has given, or raised: a future would change some errors, or end its loop.
_Result: TypeAlias = tuple[Any, BaseException | None]

# More threads than any one function may use at a time; they are started when they are needed.
_MOST_THREADS = 1024

# Failures in a row, at least, after which no other row is called.
_MOST_FAILURES = 16


class _Slots(asyncio.Semaphore):
    """As many calls as may wait; what all partitions know of the server."""

    def __init__(self, token: str, concurrency: int) -> None:
        super().__init__(concurrency)
        self.most_failures = max(concurrency, _MOST_FAILURES)
        self.no_answers = 0  # failures that other rows would have, too, since the last answer
        self.failures = 0  # of any kind, since the last answer
        self.has_outputs = False  # of any row
        self.probe: Callable[[], Any] | None = None  # call of a row that had an answer


class _Calls:
    """Event loop in a thread of its own, threads for functions that block, and limits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "image-ingest-call")
        # By token of a function and its limit: all partitions share them.
        self.slots = functools.lru_cache(64)(_Slots)
        name = "image-ingest-calls"
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

    async def in_thread(self, function: Callable[[], _Value]) -> _Value:
        """The result of a function that blocks."""
        return await self.loop.run_in_executor(self._threads, function)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Wait for a coroutine on the loop; an interrupt of this thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            future.result()
        except BaseException:
            future.cancel()
            raise

    async def called(self, call: Callable[[], Any], blocks: bool, context: Context) -> _Result:
        """Result of a call in a copy of a context; in a thread if it ``blocks``."""
        if blocks:
            inside = functools.partial(context.copy().run, call)
            given, error = await self.in_thread(functools.partial(_result, inside))
            if error is not None or not inspect.isawaitable(given):
                return given, error
            call = lambda: given  # noqa: E731
        # In a task of its own: the function may cancel the one that it runs in.
        task = self.loop.create_task(_awaited(call), context=context.copy())
        try:
            return await task
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # not by the function
                raise
            return None, error


def _result(function: Callable[[], Any]) -> _Result:
    try:
        return function(), None
    except BaseException as error:
        return None, error


async def _awaited(function: Callable[[], Awaitable[Any]]) -> _Result:
    try:
        return await function(), None
    except BaseException as error:
        return None, error


_calls: dict[int, _Calls] = {}  # by process: a fork has no threads of its parent
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def _calls_of_process() -> _Calls:
    with _lock:
        if os.getpid() not in _calls:
            _calls[os.getpid()] = _Calls()
        return _calls[os.getpid()]


@dataclass(frozen=True)
class _Failed:
    """A row without a result: the last error, and how often the function was called."""

    error: BaseException
    calls: int
    in_a_row: int = 0  # rows that failed, if so many did that other rows would, too


class _EndedError(Exception):
    """A row failed, and no other need be called."""


@dataclass(frozen=True)
class RowMap(BatchMap):
    """``map_rows`` of one partition; ``concurrency`` and ``retries`` change no result."""

    concurrency: int = field(default=16, compare=False)
    retries: int = field(default=4, compare=False)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (*super().__dask_tokenize__(), self.concurrency, self.retries)

    def _results(
        self, frame: DataFrame, rows: Sequence[int], columns: Sequence[InputColumn]
    ) -> tuple[dict[str, list[Any]], list[int], dict[int, str]]:
        columns = [column.on_host(backend_of(frame)) for column in columns]
        journal = current_journal.get()
        outcomes: list[pa.RecordBatch | _Failed | None] = [None] * len(rows)
        keys = []
        if journal is not None:
            what = (self.function.name, self.inputs, str(self._schema))
            for number in range(len(rows)):
                arguments = [column.row(number) for column in columns]
                keys.append(stable_token((what, arguments), functions=False))
            outcomes = [journal.read(key, self._schema) for key in keys]
        calls = _calls_of_process()
        context = copy_context()  # of this task, for the function and for its worker's counts
        context.run(current_journal.set, None)
        calls.run(self._complete(outcomes, columns, keys, journal, calls, context))
        done, failures, batches = [], dict[int, str](), []
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, _Failed):
                failures[row] = self._reason(outcome, frame, row)
            elif outcome is not None:
                done.append(row)
                batches.append(outcome)
        return self._columns(batches), done, failures

    async def _complete(
        self,
        outcomes: list[pa.RecordBatch | _Failed | None],
        columns: Sequence[InputColumn],
        keys: Sequence[str],
        journal: RowJournal | None,
        calls: _Calls,
        context: Context,
    ) -> None:
        """Call the function for all rows without an outcome, unless one fails for good."""
        function = self.function.get()
        blocks = not waits(function)
        slots = calls.slots(self.function.token, self.concurrency)

        def has_answer(row: int) -> None:
            slots.no_answers, slots.failures, slots.has_outputs = 0, 0, True
            if journal is not None:
                arguments = [InputColumn([column.row(row)]) for column in columns]
                slots.probe = functools.partial(_called, function, arguments, 0)

        async def complete(row: int) -> None:
            call = functools.partial(_called, function, columns, row)
            outcome = await self._outcome(call, blocks, calls, context)
            if isinstance(outcome, _Failed):
                outcomes[row] = outcome = _counted(outcome, slots)
                if not self._costs_a_row(outcome):
                    raise _EndedError
                if journal is not None:  # of a run that was stopped, rows may fail for that
                    await calls.in_thread(functools.partial(journal.write, b""))
                return
            outcomes[row] = outcome
            has_answer(row)
            context.copy().run(count, ANSWERED)
            if journal is not None and (lines := journal.add(keys[row], outcome)):
                await calls.in_thread(functools.partial(journal.write, lines))

        stored = [row for row, outcome in enumerate(outcomes) if outcome is not None]
        if stored and slots.probe is None:
            has_answer(stored[0])
        try:
            async with asyncio.TaskGroup() as group:
                for row, outcome in enumerate(outcomes):
                    if outcome is None:
                        await slots.acquire()
                        # Also if it is cancelled before it begins.
                        task = group.create_task(complete(row))
                        task.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as errors:
            if isinstance(errors.exceptions[0], _EndedError):
                return
            raise errors.exceptions[0] from None
        failed = {row: o for row, o in enumerate(outcomes) if isinstance(o, _Failed)}
        if not failed or not slots.failures:
            return
        if slots.probe is not None:
            # Has the server gone, or is it the rows? Ask again for one that had an answer.
            again = await self._outcome(slots.probe, blocks, calls, context)
            stops = isinstance(again, _Failed)
        else:  # no row had an answer
            is_wrong = all(isinstance(outcome.error, ResultError) for outcome in failed.values())
            stops = not slots.has_outputs and (journal is not None or is_wrong)
        if stops:
            row, last = failed.popitem()
            outcomes[row] = _Failed(last.error, last.calls, slots.failures)

    async def _outcome(
        self, call: Callable[[], Any], blocks: bool, calls: _Calls, context: Context
    ) -> pa.RecordBatch | _Failed:
        """The outputs for one row, after retries."""
        tries = 0
        while True:
            tries += 1
            result, error = await calls.called(call, blocks, context)
            if error is None:
                result, error = _result(functools.partial(self._batch, result))
            if error is None:
                return result
            pause = pause_before_retry(error, tries) if tries <= self.retries else None
            if pause is None:
                return _Failed(error, tries)
            await asyncio.sleep(pause)

    def _costs_a_row(self, failed: _Failed) -> bool:
        return self.errors == "null" and may_be_of_a_row(failed.error) and not failed.in_a_row

    def _reason(self, failed: _Failed, frame: DataFrame, row: int) -> str:
        """The reason in `error`; raises if the failure costs more than the row."""
        tries = f" ({failed.calls} tries)" if failed.calls > 1 else ""
        if self._costs_a_row(failed):
            return self.function.reason(failed.error) + tries
        if isinstance(failed.error, KeyboardInterrupt):
            raise failed.error
        if failed.in_a_row:
            tries += (
                f". {failed.in_a_row} rows failed in a row: when the server answers again, "
                "compute once more; a checkpoint continues"
            )
        raise self.function.failure(failed.error, frame, [row], tries) from failed.error

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        """Types of the outputs of a row; images are files of ``numpy.save``."""
        types = {n: pa.binary() if t == IMAGE else t for n, t in self.outputs.items()}
        return pa.schema(list(types.items()))

    def _batch(self, result: object) -> pa.RecordBatch:
        """The outputs that a function gave for one row, checked.

        Raises
        ------
        ResultError
            If they do not match ``outputs=``.
        """
        values = self._values_of(result)
        arrays = []
        for name, type_ in self.outputs.items():
            if type_ == IMAGE:
                (image,) = checked_images(name, [values[name]], 1, get_backend("pandas"))
                arrays.append(pa.array([_npy(image)], pa.binary()))
            else:
                arrays.append(value_array(name, values[name], type_))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _values_of(self, result: Any) -> Mapping[str, Any]:
        """The values of a row by the names of the outputs."""
        names = list(self.outputs)
        is_struct = len(names) == 1 and pa.types.is_struct(self.outputs[names[0]])
        if isinstance(result, Mapping) and result.keys() == self.outputs.keys() and not is_struct:
            return result
        if len(names) == 1:
            return {names[0]: result}
        if result is None:
            return dict.fromkeys(names)
        raise ResultError(
            f"{type(result).__name__} for the outputs {', '.join(map(repr, names))}",
            ": give a dict of these, or None",
        )

    def _columns(self, batches: Sequence[pa.RecordBatch]) -> dict[str, list[Any]]:
        """The outputs of all rows, as those of one batch."""
        results: dict[str, list[Any]] = {name: [] for name in self.outputs}
        if batches:
            for number, (name, type_) in enumerate(self.outputs.items()):
                rows = [batch.column(number) for batch in batches]
                if type_ == IMAGE:
                    results[name] = [[_image(row[0].as_py())] for row in rows]
                else:
                    results[name] = rows
        return results


def _counted(failed: _Failed, slots: _Slots) -> _Failed:
    """Count a failure that other rows would have, too; say if there were too many in a row."""
    slots.failures += 1
    if not _may_be_of_all(failed.error):
        return failed
    slots.no_answers += 1
    if slots.no_answers < slots.most_failures:
        return failed
    slots.no_answers = 0  # for the next computation
    return _Failed(failed.error, failed.calls, slots.most_failures)


def _called(function: Callable[..., Any], columns: Sequence[InputColumn], row: int) -> Any:
    return function(*(column.row(row) for column in columns))


def _npy(image: np.ndarray | None) -> bytes | None:
    if image is None:
        return None
    file = io.BytesIO()
    np.save(file, image)
    return file.getvalue()


def _image(file: bytes | None) -> np.ndarray | None:
    image: np.ndarray | None = None
    if file is not None:
        image = np.load(io.BytesIO(file), allow_pickle=False)
    return image


def make_row_map(
    function: Callable[..., Any],
    outputs: Mapping[str, TypeLike],
    concurrency: int,
    retries: int,
    **options: Any,
) -> RowMap:
    """Check the arguments of ``map_rows``; ``options`` are those of `make_batch_map`."""
    concurrency = whole_number(
        "concurrency", concurrency, 1, "pass how many calls may wait at a time", most=_MOST_THREADS
    )
    retries = whole_number("retries", retries, 0, "pass how often a call is tried again")
    batches = make_batch_map(function, outputs, 1, called_by="map_rows", **options)
    return RowMap(**vars(batches), concurrency=concurrency, retries=retries)


# Exponential backoff, in seconds, with jitter. A server that asks for more than the last is not
# waited for.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_WAIT = 0.5, 30.0, 600.0

# Request Timeout, Too Early, Too Many Requests.
_RETRIED = (408, 425, 429)

# Unauthorized, Payment Required. (403 and 404 may be of one row: a refused image, a dead link.)
_NO_ACCESS = (401, 402)

# What gRPC's codes are among those of HTTP, by their names.
_OF_GRPC = {
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}

# Errors of connections by words in the names of their types, of which each client has its own.
_OF_CONNECTIONS = re.compile(
    "Connect(ion|or|Error)|Disconnected|Time.?out|gaierror|TransportError|ProtocolError"
    "|ClientPayloadError|IncompleteRead|MaxRetry"
)


def pause_before_retry(error: BaseException, attempt: int) -> float | None:
    """Seconds to wait before the next attempt; None if it would fail again.

    Answers with the status 429, 5xx, 408 or 425, time-outs and errors of the connection may not.
    """
    if not _is_temporary(error):
        return None
    asked = max(map(_retry_after, causes(error)))
    if asked > _LONGEST_WAIT:
        return None
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1))
    return max(asked, pause * random.uniform(0.5, 1.0))


def _is_temporary(error: BaseException) -> bool:
    """True if the next attempt may succeed."""
    for cause in causes(error):
        status = _status(cause)
        if status is not None:
            return status in _RETRIED or status >= 500
        if any(_OF_CONNECTIONS.search(kind.__name__) for kind in type(cause).__mro__):
            return True
    return False


def _may_be_of_all(error: BaseException) -> bool:
    """True for failures that other rows would have, too: no answer, no access, a wrong result."""
    no_access = any(_status(cause) in _NO_ACCESS for cause in causes(error))
    return no_access or _is_temporary(error) or isinstance(error, ResultError)


def _status(error: BaseException) -> int | None:
    """The status of an answer, by the attributes that clients give their errors."""
    for holder in _holders(error):
        for name in ("status_code", "status", "code", "HTTPStatusCode"):
            status = _of(holder, name)
            status = _OF_GRPC.get(f"{getattr(status, 'name', status)}".rpartition(".")[2], status)
            with contextlib.suppress(ValueError, TypeError):
                if 400 <= int(status) < 600:
                    return int(status)
    return None


def _retry_after(error: BaseException) -> float:
    """Seconds that the server asks to wait; 0 if it does not."""
    for holder in _holders(error):
        headers = _of(holder, "headers") or _of(holder, "HTTPHeaders")
        text = _of(headers, "Retry-After") or _of(headers, "retry-after") or ""
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, float(text))
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def _holders(error: BaseException) -> Iterator[Any]:
    """Objects that may have the answer's status: the error, its response, and botocore's."""
    response = _of(error, "response")
    yield from (error, response, _of(response, "ResponseMetadata"))


def _of(holder: Any, name: str) -> Any:
    """An attribute or item, or what it gives if it is a method; None without one."""
    try:
        is_item = hasattr(holder, "get") and not hasattr(holder, name)
        value = holder.get(name) if is_item else getattr(holder, name, None)
        return value() if callable(value) else value
    except Exception:  # of a user's class
        return None
