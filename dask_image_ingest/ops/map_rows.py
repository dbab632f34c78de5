"""``map_rows``: a function that waits, such as for a server, called for several rows at once.

Calls of all partitions of a process run on one event loop in a thread of its own, at most
``concurrency`` at a time: coroutines on the loop, other functions in threads. In a checkpoint
results are written to a journal, so that a killed run does not repeat them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import io
import os
import random
import re
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.computing import ANSWERED, count
from dask_image_ingest.errors import FunctionError
from dask_image_ingest.frames import IMAGE, backend_of, get_backend
from dask_image_ingest.ops.arrow_rows import ResultError
from dask_image_ingest.ops.inputs import InputColumn
from dask_image_ingest.ops.map_batches import (
    BatchMap,
    causes,
    make_batch_map,
    may_be_of_a_row,
    waits,
)
from dask_image_ingest.ops.outputs import checked_images, value_array
from dask_image_ingest.storage.output import (
    STAGING,
    OutputStore,
    refuse_ended_run,
    refuse_other_run,
)
from dask_image_ingest.user_functions import stable_token

# --- the loop of this process -------------------------------------------------------------------

# More threads than any one function may use at a time; they are started when they are needed.
_MOST_THREADS = 1024


class _Calls:
    """Event loop in a thread of its own, threads for functions that block, and limits."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "image-ingest-call")
        # Token of a function and its limit → the slots that all partitions share.
        self._slots: WeakValueDictionary[Any, _Slots] = WeakValueDictionary()
        # Of the last functions, so that failures are counted over partitions.
        self._recent: deque[_Slots] = deque(maxlen=8)
        threading.Thread(target=self._run, name="image-ingest-calls", daemon=True).start()

    def _run(self) -> None:
        # An exit in a task that a function has started ends `run_forever`.
        while not self.loop.is_closed():
            with contextlib.suppress(BaseException):
                self.loop.run_forever()

    def slots(self, token: str, concurrency: int) -> _Slots:
        """The slots of a function."""
        slots = self._slots.get((token, concurrency))
        if slots is None:
            slots = self._slots[token, concurrency] = _Slots(concurrency)
            self._recent.append(slots)
        return slots

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """The result of a function that blocks."""
        return await self.loop.run_in_executor(self._threads, function)

    def run(self, function: Callable[[], Awaitable[float]]) -> float:
        """The result of a coroutine on the loop; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(_awaited(function), self.loop)
        try:
            result, error = future.result()
        except BaseException:
            future.cancel()
            raise
        if isinstance(error, asyncio.CancelledError):  # by a function: rows have no outcome
            return 0.0
        if error is not None:
            raise error
        answered: float = result
        return answered

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
            return None, error


class _Slots(asyncio.Semaphore):
    """As many calls as may wait; counts the rows that failed as others would."""

    def __init__(self, concurrency: int) -> None:
        super().__init__(concurrency)
        self._most_failures = max(concurrency, 16)
        self._failures = 0  # since the last row with outputs
        self.has_outputs = False
        self._run: str | None = None
        self.answered = 0.0  # the time of the last row with outputs in this run; 0 without one

    def begin(self, run: str | None) -> None:
        """Begin a partition of a run of a checkpoint."""
        if run != self._run:
            self._run, self._failures, self.answered = run, 0, 0.0

    def succeeded(self) -> None:
        """Count a row with outputs."""
        self._failures, self.has_outputs, self.answered = 0, True, time.time()

    def failed(self) -> int:
        """Count a row that failed; how many did, if no other need be called."""
        self._failures += 1
        if self._failures < self._most_failures:
            return 0
        self._failures = 0  # for the next computation
        return self._most_failures


# What a call has given, or raised: a future may change errors, refuse them, or end its loop.
_Result: TypeAlias = tuple[Any, BaseException | None]


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


_lock = threading.Lock()
# A fork has no threads, so it makes calls of its own; those of its parents are kept, unused.
_calls: list[_Calls | None] = [None]


def _calls_of_process() -> _Calls:
    with _lock:
        calls = _calls[-1]
        if calls is None:
            calls = _calls[-1] = _Calls()
        return calls


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _calls.append(None)


os.register_at_fork(after_in_child=_forked)


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    """A row without a result: the last error, and how often the function was called."""

    error: BaseException
    calls: int
    in_a_row: int = 0  # rows that failed, so that it is no row's fault
    at: float = field(default_factory=time.time)


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
        self, frame: Any, rows: Sequence[int], columns: Sequence[InputColumn]
    ) -> tuple[dict[str, list[Any]], list[int], dict[int, str]]:
        columns = [column.on_host(backend_of(frame)) for column in columns]
        journal = _journal.get()
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
        context.run(_journal.set, None)
        answered = calls.run(
            functools.partial(self._complete, outcomes, columns, keys, journal, calls, context)
        )
        done, failures, batches, late = [], dict[int, str](), [], []
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, _Failed):
                failures[row] = self._reason(outcome, frame, row)
                late += [(outcome.at, row)] if outcome.at > answered else []
            elif outcome is not None:
                done.append(row)
                batches.append(outcome)
        if lost := [row for row, o in zip(rows, outcomes, strict=True) if o is None]:
            cancelled = asyncio.CancelledError("a function cancelled the calls of others")
            raise self.function.failure(cancelled, frame, lost[:1])
        if journal is not None:
            _, first = min(late, default=(0, None))
            error = "" if first is None else self.function.told(frame, first, failures[first])
            times = [at for at, _ in late]
            journal.endings.append(
                Ending(self.function.token, self.concurrency, answered, times, error)
            )
        return self._columns(batches), done, failures

    async def _complete(
        self,
        outcomes: list[pa.RecordBatch | _Failed | None],
        columns: Sequence[InputColumn],
        keys: Sequence[str],
        journal: RowJournal | None,
        calls: _Calls,
        context: Context,
    ) -> float:
        """Call the function for all rows without an outcome, unless one fails for good.

        Returns when a row of any partition was answered last.
        """
        function = self.function.get()
        blocks = not waits(function)
        slots = calls.slots(self.function.token, self.concurrency)
        slots.has_outputs |= any(outcome is not None for outcome in outcomes)
        slots.begin(None if journal is None else journal.run)

        async def complete(row: int) -> None:
            call = functools.partial(_called, function, columns, row)
            outcome = await self._outcome(call, blocks, calls, context)
            if isinstance(outcome, _Failed):
                if _may_be_of_all(outcome.error):
                    outcome = replace(outcome, in_a_row=slots.failed())
                outcomes[row] = outcome
                if not self._costs_a_row(outcome):
                    raise _EndedError
                if journal is not None:  # of a run that was stopped, rows may fail for that
                    await calls.in_thread(journal.check)
                return
            outcomes[row] = outcome
            slots.succeeded()
            context.copy().run(count, ANSWERED)
            if journal is not None:
                journal.add(keys[row], outcome)
                if rows := journal.due():
                    await calls.in_thread(functools.partial(journal.write, rows))

        with contextlib.suppress(_EndedError):
            try:
                async with asyncio.TaskGroup() as group:
                    for row, outcome in enumerate(outcomes):
                        if outcome is None:
                            await slots.acquire()
                            # Also if it is cancelled before it begins.
                            group.create_task(complete(row)).add_done_callback(
                                lambda _: slots.release()
                            )
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        if not slots.has_outputs:  # of any row: they are no row's fault
            for row, outcome in enumerate(outcomes):
                if isinstance(outcome, _Failed) and isinstance(outcome.error, _WrongResultError):
                    outcomes[row] = replace(outcome, in_a_row=len(outcomes))
        return slots.answered

    async def _outcome(
        self, call: Callable[[], Any], blocks: bool, calls: _Calls, context: Context
    ) -> pa.RecordBatch | _Failed:
        """The outputs for one row, after retries."""
        tries = 0
        while True:
            tries += 1
            result, error = await calls.called(call, blocks, context)
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise error
            if error is None:
                result, error = _result(functools.partial(self._batch, result))
            if error is None:
                return result
            pause = pause_before_retry(error, tries) if tries <= self.retries else None
            if pause is None:
                return _Failed(error, tries)
            await asyncio.sleep(pause)

    def _costs_a_row(self, failed: _Failed) -> bool:
        error = failed.error
        return self.errors == "null" and may_be_of_a_row(error) and not failed.in_a_row

    def _reason(self, failed: _Failed, frame: Any, row: int) -> str:
        """The reason in `error`; raises if the failure costs more than the row."""
        error = failed.error
        if isinstance(error, KeyboardInterrupt):
            raise error
        costs_a_row = self._costs_a_row(failed)
        if isinstance(error, _WrongResultError):
            wrong = error.error
            if not costs_a_row:
                raise self.function.wrong_result(wrong, frame, [row]) from wrong
            return self.function.reason(wrong)
        tries = f" ({failed.calls} tries)" if failed.calls > 1 else ""
        if not costs_a_row:
            if failed.in_a_row:
                tries += (
                    f". {failed.in_a_row} rows failed in a row: when the server answers again, "
                    "compute once more; a checkpoint continues"
                )
            raise self.function.failure(error, frame, [row], tries) from error
        return self.function.reason(error) + tries

    @functools.cached_property
    def _schema(self) -> pa.Schema:
        """Types of the outputs of a row; images are files of ``numpy.save``."""
        types = {n: pa.binary() if t == IMAGE else t for n, t in self.outputs.items()}
        return pa.schema(list(types.items()))

    def _batch(self, result: Any) -> pa.RecordBatch:
        """The outputs that a function gave for one row, checked.

        Raises
        ------
        _WrongResultError
            If they do not match ``outputs=``.
        """
        host = get_backend("pandas")
        try:
            values = self._values_of(result)
            arrays = [
                pa.array(
                    [_npy(image) for image in checked_images(name, [values[name]], 1, host)]
                ).cast(pa.binary())
                if type_ == IMAGE
                else value_array(name, values[name], type_)
                for name, type_ in self.outputs.items()
            ]
        except ResultError as error:
            raise _WrongResultError(error) from error
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _values_of(self, result: Any) -> Mapping[str, Any]:
        """The values of a row by the names of the outputs."""
        names = list(self.outputs)
        is_named = isinstance(result, Mapping) and result.keys() == self.outputs.keys()
        if is_named and not _is_struct(result, self.outputs):
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
                    is_plain = pa.types.is_string(type_) or pa.types.is_binary(type_)
                    results[name] = [row.to_pylist() for row in rows] if is_plain else rows
        return results


class _WrongResultError(Exception):
    """A result does not match ``outputs=``."""

    def __init__(self, error: ResultError) -> None:
        super().__init__(str(error))
        self.error = error


def _called(function: Callable[..., Any], columns: Sequence[InputColumn], row: int) -> Any:
    return function(*(column.row(row) for column in columns))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_struct(result: Mapping[str, Any], outputs: Mapping[str, pa.DataType]) -> bool:
    """True if a dict of the only output's name is its value: of a struct with such a field."""
    ((name, type_), *others) = outputs.items()
    if others or not pa.types.is_struct(type_) or (at := type_.get_field_index(name)) < 0:
        return False
    value, field = result[name], type_[at].type
    if not isinstance(value, Mapping):
        return True
    return pa.types.is_struct(field) and value.keys() <= {each.name for each in field}


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
    outputs: Mapping[str, Any],
    concurrency: int,
    retries: int,
    **options: Any,
) -> RowMap:
    """Check the arguments of ``map_rows``; ``options`` are those of `make_batch_map`.

    Raises
    ------
    ArgumentError
    """
    concurrency = whole_number(
        "concurrency", concurrency, 1, "pass how many calls may wait at a time", most=_MOST_THREADS
    )
    retries = whole_number("retries", retries, 0, "pass how often a call is tried again")
    batches = make_batch_map(function, outputs, 1, called_by="map_rows", **options)
    return RowMap(**vars(batches), concurrency=concurrency, retries=retries)


# --- retries ------------------------------------------------------------------------------------

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
    for each in causes(error):
        status = _status(each)
        if status is not None:
            return status in _RETRIED or status >= 500
        if any(_OF_CONNECTIONS.search(kind.__name__) for kind in type(each).__mro__):
            return True
    return False


def _may_be_of_all(error: BaseException) -> bool:
    """True for failures that other rows would have, too: no answer, no access, a wrong result."""
    no_access = any(_status(each) in _NO_ACCESS for each in causes(error))
    return no_access or _is_temporary(error) or isinstance(error, _WrongResultError)


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


# --- the journal --------------------------------------------------------------------------------

# Seconds between files of a journal in an object store, where a file cannot be appended to.
_WRITTEN_EVERY = 5.0

_SUFFIX = ".rows"


class RowJournal:
    """Results of single rows of a partition, in files of the staging folder.

    On a local file system each is appended to one file when it is there. In an object store those
    of some seconds are a file. A line is a row: its key, its outputs as an Arrow message, and a
    checksum. Lines that a kill has cut are skipped. The key is a digest of the function's name and
    arguments; the files belong to one query and partition.
    """

    def __init__(self, output: OutputStore, name: str, run: str) -> None:
        self._output = output
        self._name = name
        self.run = run
        self.endings: list[Ending] = []
        self._pending: list[bytes] = []
        self._written_at = time.monotonic()

    def _files(self) -> list[str]:
        files = self._output.sizes(STAGING)
        return [f"{STAGING}/{file}" for file in files if journal_owner(file) == self._name]

    @functools.cached_property
    def _stored(self) -> dict[str, bytes]:
        """Key → message."""
        stored = {}
        contents = (self._output.read(file) or b"" for file in self._files())
        for line in b"\n".join(contents).split(b"\n"):
            key, _, rest = line.partition(b" ")
            message, _, checksum = rest.partition(b" ")
            with contextlib.suppress(ValueError):
                if zlib.crc32(message) == int(checksum, 16):
                    stored[key.decode()] = base64.b64decode(message, validate=True)
        return stored

    def read(self, key: str, schema: pa.Schema) -> pa.RecordBatch | None:
        """The stored outputs of a row; None if there are none."""
        message = self._stored.get(key)
        if message is None:
            return None
        return pa.ipc.read_record_batch(pa.py_buffer(message), schema)

    def add(self, key: str, outputs: pa.RecordBatch) -> None:
        """Add the outputs of a row, to be written."""
        message = base64.b64encode(outputs.serialize())
        # The newline comes first, since a kill may have cut the line before.
        self._pending.append(b"\n%s %s %08x" % (key.encode(), message, zlib.crc32(message)))

    def due(self) -> bytes:
        """The rows to write now, if it is time; they are given once."""
        waited = time.monotonic() - self._written_at
        return self.pending() if self._output.can_append or waited >= _WRITTEN_EVERY else b""

    def pending(self) -> bytes:
        """The rows that are not written; they are given once."""
        lines, self._pending = self._pending, []
        self._written_at = time.monotonic()
        return b"".join(lines)

    def write(self, rows: bytes) -> None:
        """Write rows: they survive a kill of the process.

        Raises
        ------
        ExportError
            If another run writes, or this one was stopped.
        """
        if not rows:
            return
        refuse_other_run(self._output, self.run)
        if self._output.can_append:
            self._output.append(f"{STAGING}/{self._name}{_SUFFIX}", rows)
        else:
            self._output.put(f"{STAGING}/{self._name}.{uuid.uuid4().hex}{_SUFFIX}", rows)
        refuse_ended_run(self._output, self.run)

    def check(self) -> None:
        """Raise if another run writes, or this one was stopped.

        Raises
        ------
        ExportError
        """
        refuse_other_run(self._output, self.run)
        refuse_ended_run(self._output, self.run)

    @property
    def has_late_failures(self) -> bool:
        """True if only the end of the run tells whether the partition may be stored."""
        return any(ending.late for ending in self.endings)

    def remove(self) -> None:
        """Remove the files: the partition is stored."""
        if "_stored" in vars(self):
            self._output.remove(self._files())


@dataclass(frozen=True)
class Ending:
    """State of a function's calls when a partition ended."""

    function: str  # its token
    concurrency: int
    answered: float  # when a row was, in any partition of this process; 0 if none was
    late: Sequence[float]  # when rows of the partition failed, since then
    error: str  # of the first of these


def refuse_late_failures(endings: Iterable[Ending], known_to_answer: bool) -> None:
    """Refuse to store rows that failed where the server may have gone: no row was answered since.

    Raises
    ------
    FunctionError
        If as many rows as calls may wait failed at the end of a run; if no row ever had an answer,
        for any failure.
    """
    by_function: dict[str, list[Ending]] = {}
    for ending in endings:
        by_function.setdefault(ending.function, []).append(ending)
    for ended in by_function.values():
        answered = max(end.answered for end in ended)
        late = sorted((at, end.error) for end in ended for at in end.late if at > answered)
        most = max(2, ended[0].concurrency)  # one row may fail by itself
        if len(late) >= most or (late and not (answered or known_to_answer)):
            advice = (
                f". If the rows are at fault, a concurrency= of more than {len(late)} stores them"
                if answered or known_to_answer
                else ""
            )
            raise FunctionError(
                f"{late[0][1]}. No row was answered after it, and {len(late)} failed: they are not "
                "stored, as the server may have gone. When it answers, call checkpoint() again, "
                f"which asks for the rows without an answer{advice}"
            )


def journal_owner(file: str) -> str | None:
    """The name of the partition that a journal belongs to; None for another file."""
    if not file.endswith(_SUFFIX):
        return None
    name, dot, _ = file.removesuffix(_SUFFIX).partition(".parquet")
    return name + dot


_journal: ContextVar[RowJournal | None] = ContextVar("journal", default=None)


@contextlib.contextmanager
def journaled(output: OutputStore, name: str, run: str) -> Iterator[RowJournal]:
    """Keep the results of ``map_rows`` in this thread, until the context ends without an error.

    They stay if rows of the partition failed late.
    """
    journal = RowJournal(output, name, run)
    token = _journal.set(journal)
    try:
        yield journal
    except BaseException:
        with contextlib.suppress(Exception):
            journal.write(journal.pending())
        raise
    finally:
        _journal.reset(token)
    if journal.has_late_failures:
        journal.write(journal.pending())
    else:
        journal.remove()
