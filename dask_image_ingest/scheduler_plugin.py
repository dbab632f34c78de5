"""The check of a cluster before its first query with images, and the scheduler's part in queries.

A worker that can't unpickle a task closes its connection, and when the last one has, a query waits
forever. So a client asks the scheduler and each worker which packages they have, before its first
task. Workers that join later check themselves, by a worker plugin that needs no import of this
package, and close before their first task if they are unfit. The scheduler plugin tells clients of
them, and fails the tasks that no worker is left for. An asynchronous client's tasks may reach a
worker before the check does; so a worker that dies unchecked over one of them counts as unfit. The
plugin also marks tasks that were on a worker when it died: see `crash_guard`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import dask
from dask.base import get_scheduler
from dask.typing import Key
from distributed import Client, Scheduler, SchedulerPlugin, WorkerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskGroup, TaskState

from dask_image_ingest.environment import PACKAGE, Portable, environment
from dask_image_ingest.errors import ArgumentError, ClusterError, warn_user

logger = logging.getLogger("dask_image_ingest")

#: Annotation of a task that was on a worker when it died.
HAS_KILLED: Final = "image-ingest-has-killed"

# Topics of events: workers with the worker plugin tell the scheduler whether they are fit, and
# clients that did not wait for the check tell it what workers have answered.
_JOINED: Final = "image-ingest-joined"
_CHECKED: Final = "image-ingest-checked"

_CHECK = "image-ingest-check"  # name of the worker plugin

# A module of this package in a pickle: opcode and length, then the name. In a file's path, other
# characters come before the name.
_OUR_MODULE = re.compile(rb"\x8c.dask_image_ingest[.\x94]", re.DOTALL)

_PATIENCE = 30.0  # seconds to wait for the answers of workers
_LONELY = 30.0  # seconds without a worker, after which a cluster that has refused some gives up

# Reason for a worker that left before it was checked.
_CLOSED = f"closed its connection over a task with images, as one does that has no {PACKAGE}"

_MAX_NAMED = 10  # workers listed in a message
_MAX_SUSPECTS = 10_000


class PrepareScheduler(SchedulerPlugin):
    """Tell of workers that were refused; mark tasks that killed a worker."""

    name = "image-ingest"
    idempotent = True

    def __init__(self) -> None:
        self._patience = _LONELY  # as configured in the client's process
        # Reason by worker, of those that were refused since the last one that was not.
        self._refused: dict[str, str] = {}
        # Workers that may get a task before it is known whether they are fit.
        self._unchecked: set[str] = set()
        # Tasks that were on a worker when it died, oldest first.
        self._suspects: dict[Key, None] = {}
        self._scheduler: Scheduler

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask."""
        self._scheduler = scheduler
        self._unchecked.update(scheduler.workers)
        # The tasks of an asynchronous client may have come first, and a worker may have died.
        for _, event in scheduler.get_events("all"):
            self._note_worker(event)
        self._watch_waiting()

    def log_event(self, topic: str, msg: Any) -> None:
        """Note which workers are fit, and tell all clients of one that is not; called by Dask."""
        if topic == "all":
            self._note_worker(msg)
        elif topic == _JOINED:
            self._unchecked.discard(msg["worker"])  # Dask adds the worker
            if msg["reason"]:
                self._refuse(
                    {f"{msg['host']} ({msg['worker']})": msg["reason"]},
                    "It was closed before its first task, since queries with images have been "
                    "computed on this cluster",
                )
            else:
                self._refused.clear()
        elif topic == _CHECKED:
            for worker in msg["answered"]:
                self._unchecked.discard(worker)
                self._refused.pop(worker, None)  # it has died, but the reason is known now
            self._refused |= msg["unfit"]
        else:
            return
        self._watch_waiting()

    def _note_worker(self, event: Any) -> None:
        """Note workers that join unchecked, and those of them that die over a task with images."""
        match event:
            case {"action": "add-worker", "worker": worker}:
                if not any(name.startswith(_CHECK) for name in self._scheduler.worker_plugins):
                    self._unchecked.add(worker)
            case {"action": "remove-worker", "worker": worker} if worker in self._unchecked:
                self._unchecked.remove(worker)
                tasks = self._scheduler.tasks
                had = [tasks[key] for key in event["processing-tasks"] if key in tasks]
                if not event["expected"] and _groups_of_ours(had):
                    self._refuse({worker: _CLOSED}, "Its log tells more")

    def _refuse(self, workers: dict[str, str], more: str) -> None:
        self._refused |= workers
        told = f"{_sentences(workers)} {more}"
        logger.error(told)
        self._scheduler.log_event("warn", {"message": dumps(told)})

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        """Called by Dask."""
        self._watch_waiting()

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Record a task whose worker died, and annotate it when it is retried; called by Dask."""
        if start == "processing":
            if finish == "memory":
                self._suspects.pop(key, None)
            elif finish in ("released", "erred") and self._scheduler.tasks[key].suspicious:
                self._suspects[key] = None
                if len(self._suspects) > _MAX_SUSPECTS:
                    self._suspects.pop(next(iter(self._suspects)))
        elif finish == "waiting" and key in self._suspects:
            task = self._scheduler.tasks[key]
            task.annotations = {**(task.annotations or {}), HAS_KILLED: True}

    def _watch_waiting(self) -> None:
        if self._refused and not self._scheduler.workers:
            asyncio.get_running_loop().call_later(self._patience, self._fail_waiting)

    def _fail_waiting(self) -> None:
        """Fail tasks of this package that wait where workers are refused, and none is left."""
        scheduler = self._scheduler
        if not self._refused or scheduler.workers:
            return
        error = dumps(
            ClusterError(
                f"{scheduler.address} has no worker left that can run this query. "
                f"{_sentences(self._refused)} {_install(environment())}"
            )
        )
        waiting = [*scheduler.unrunnable, *scheduler.queued]
        ours = _groups_of_ours(waiting)
        failed: dict[Key, Any] = {}
        stimulus = f"image-ingest-{time.time()}"
        for task in waiting:
            if task.group in ours:
                failed |= scheduler.transition(
                    task.key, "erred", stimulus, exception=error, cause=task.key
                )
        scheduler.transitions(failed, stimulus)


def _groups_of_ours(tasks: Iterable[TaskState]) -> set[TaskGroup]:
    """Groups of the tasks, of those that use this package."""
    # The tasks of a group run the same function: look at one of them.
    one_of_each = {task.group: task for task in tasks}
    return {group for group, task in one_of_each.items() if _is_ours(task)}


def _is_ours(task: TaskState) -> bool:
    try:
        return bool(_OUR_MODULE.search(dumps(task.run_spec)))
    except Exception:  # of any object of another client
        return False


class CheckWorker(WorkerPlugin):
    """Worker plugin that closes a worker on which tasks of this package would fail.

    Parameters
    ----------
    here
        The client's `environment`.
    """

    idempotent = True

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._here = here
        # A scheduler may have clients with DALI and without.
        self.name = _CHECK + ("-dali" if here["dali"] else "")

    def __reduce__(self) -> tuple[Portable, tuple[Any, ...]]:
        arguments = (Portable(environment), Portable(_lack), self._here, _JOINED)
        return Portable(_check_plugin), arguments


def _check_plugin(
    environment: Callable[[], dict[str, Any]],
    lack: Callable[..., str],
    here: Mapping[str, Any],
    topic: str,
) -> WorkerPlugin:
    """Restore the plugin on a worker. Sent as a `Portable`, since it may lack this package."""
    import logging

    from distributed import WorkerPlugin

    class Check(WorkerPlugin):
        async def setup(self, worker: Any) -> None:
            found = environment()
            reason = lack(found, here)
            worker.log_event(topic, {"host": found["host"], "reason": reason})
            if reason:
                logging.getLogger("distributed.worker").error("Refused: it has %s", reason)
                # Its tasks go back first: they have not killed it. It can't close before it has
                # started, as its nanny would wait for that, but it does without a connection.
                await worker.scheduler.retire_workers(
                    workers=[worker.address], close_workers=False, remove=True
                )
                await worker.batched_stream.close()

    return Check()


def _lack(found: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Reason why a process can't run tasks of a client; empty if it can. Sent as a `Portable`."""
    package = "dask-image-ingest"
    if found[package] is None:
        return f"no {package}"
    if found[package] != here[package]:
        return f"{package} {found[package]} (here {here[package]})"
    return "no DALI" if here["dali"] and not found["dali"] else ""


def _sentences(reasons: Mapping[str, str]) -> str:
    """One sentence per reason, with the workers that have it."""
    by_reason: dict[str, list[str]] = {}
    for worker, reason in reasons.items():
        by_reason.setdefault(reason, []).append(worker)
    return " ".join(_sentence(reason, workers) for reason, workers in by_reason.items())


def _sentence(reason: str, workers: list[str]) -> str:
    more = f" and {len(workers) - _MAX_NAMED} more" if len(workers) > _MAX_NAMED else ""
    have = "worker has" if len(workers) == 1 else "workers have"
    return f"{len(workers)} {have} {reason}: {', '.join(workers[:_MAX_NAMED])}{more}."


# Functions that compute, by the argument that names the scheduler.
_BY_DASK = (dask.compute.__code__, dask.persist.__code__)
_BY_CLIENT = (Client.compute.__code__, Client.persist.__code__)

# Scheduler by client, of clusters that have been checked.
_checked: WeakKeyDictionary[Client, str] = WeakKeyDictionary()
_PROCESS = os.getpid()


def check_cluster_in_use() -> None:
    """Check the cluster that computes the query that is being lowered, once a client.

    An asynchronous client can't wait, so its cluster is checked a little later, in its event loop.

    Raises
    ------
    ClusterError
        As `check_cluster`.
    """
    client = _client_in_use()
    if client is None or _checked.get(client) == _scheduler_of(client):
        return
    if client.asynchronous:
        _checked[client] = _scheduler_of(client)
        client.loop.add_callback(_check_later, client)
    else:
        check_cluster(client)


def check_cluster(client: Client) -> dict[str, dict[str, Any]]:
    """Check a client's cluster, and those of its workers that join later.

    Returns
    -------
    dict
        Environment by address, of the workers that have answered.

    Raises
    ------
    ClusterError
        If the scheduler or a worker lacks this package, has another version of it, or lacks DALI
        while this process has it.
    """
    answers: _Answers = client.sync(_check, client)
    if answers.unfit:
        raise ClusterError(_refusal(client, answers.unfit))
    _checked[client] = _scheduler_of(client)
    _warn_of(answers.silent)
    return answers.found


def _scheduler_of(client: Client) -> str:
    """Identity of the scheduler: after a restart, clients connect to another at its address."""
    identity: str = client._scheduler_identity.get("id", "")
    return identity


async def _check_later(client: Client) -> None:
    try:
        answers = await _check(client)
        checked = {"answered": [*answers.found], "unfit": answers.unfit}
        await client.log_event(_CHECKED, checked)
    except ClusterError as error:
        _checked.pop(client, None)
        warnings.warn(str(error), stacklevel=1)
        return
    except Exception:
        if client.status == "running":
            raise
        return  # it was closed meanwhile
    _warn_of(answers.silent)
    if answers.unfit:
        _checked.pop(client, None)
        warnings.warn(_refusal(client, answers.unfit), stacklevel=1)


def _warn_of(silent: list[str]) -> None:
    if silent:
        told = _sentence(f"not answered for {_PATIENCE:.0f} s", silent)
        warn_user(f"{told} Tasks that it is given wait until it does")


def _refusal(client: Client, unfit: Mapping[str, str]) -> str:
    return (
        f"{client.scheduler.address} can't run this query. {_sentences(unfit)} "
        f"{_install(environment())}, or close these workers: client.retire_workers([...])"
    )


def _install(here: Mapping[str, Any]) -> str:
    dali = " with DALI" if here["dali"] else ""
    return (
        f"Install {PACKAGE} {here[PACKAGE]}{dali} where the workers run, as here, and start them "
        "again"
    )


class _Answers(NamedTuple):
    """Environment by address of the workers, and reason by unfit worker.

    ``silent`` are the addresses of those that have not answered.
    """

    found: dict[str, dict[str, Any]]
    silent: list[str]
    unfit: dict[str, str]


async def _check(client: Client) -> _Answers:
    here = environment()
    await _check_scheduler(client, here)
    await client.register_plugin(PrepareScheduler())
    workers = await workers_of(client)
    answers = await run_on_each(client, workers, Portable(environment))
    # Others may be configured to run no functions.
    found = {address: there for address, there in answers.items() if isinstance(there, dict)}
    lacks = {address: _lack(there, here) for address, there in found.items()}
    unfit = {f"{found[a]['host']} ({a})": lack for a, lack in lacks.items() if lack}
    if not unfit:
        await register_worker_plugin(client, CheckWorker(here))
    silent = [address for address in workers if address not in answers]
    if silent:
        present = await workers_of(client)
        silent = [address for address in silent if address in present]
    return _Answers(found, silent, unfit)


async def _check_scheduler(client: Client, here: Mapping[str, Any]) -> None:
    with suppress(ValueError):  # it may be configured to run no functions
        there = await client.run_on_scheduler(Portable(environment))
        if there[PACKAGE] != here[PACKAGE]:
            has = f"{PACKAGE} {there[PACKAGE]}" if there[PACKAGE] else f"no {PACKAGE}"
            raise ClusterError(
                f"The scheduler {client.scheduler.address}, on {there['host']}, has {has}. "
                f"Install {here[PACKAGE]} there, as here, and start it again"
            )


async def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """The scheduler's information on each worker, by address.

    Not by `Client.scheduler_info`: before it returns, the client's periodic update may replace what
    it has asked for by totals without workers.
    """
    identity = await client.scheduler.identity(n_workers=-1)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    return workers


async def register_worker_plugin(client: Client, plugin: WorkerPlugin) -> None:
    """Register a worker plugin, and wait for the workers that answer in time."""
    with suppress(OSError):  # a timeout is one, too
        await asyncio.wait_for(client.register_plugin(plugin), _PATIENCE)


async def run_on_each(
    client: Client, workers: Iterable[str], function: Callable[..., Any], *args: Any
) -> dict[str, Any]:
    """Results of a function by worker, or exceptions, from those that answer in time."""

    async def run(worker: str) -> dict[str, Any]:
        result = client.run(function, *args, workers=[worker], on_error="return")
        with suppress(OSError):  # a timeout is one, too
            return await asyncio.wait_for(result, _PATIENCE)
        return {}

    results = await asyncio.gather(*map(run, workers))
    return {worker: result for by_worker in results for worker, result in by_worker.items()}


def current_client() -> Client | None:
    """The current client of this process; None without one."""
    if os.getpid() != _PROCESS:  # a fork has its parent's client, but not its event loop
        return None
    configured = dask.config.get("scheduler", None)
    if isinstance(configured, Client):
        return configured
    try:
        return Client.current()
    except ValueError:
        return None


def client_that_computes(scheduler: Any = None, collections: Any = None) -> Client | None:
    """The client on which Dask would compute now; None if it would compute in this process.

    Raises
    ------
    ArgumentError
        If the client is asynchronous.
    """
    if os.getpid() != _PROCESS:
        return None
    try:
        get = get_scheduler(scheduler=scheduler, collections=collections)
    except RuntimeError as error:
        raise ArgumentError(
            "this waits for a result, and the client is asynchronous: connect with "
            "Client(address), without asynchronous=True. A frame is computed by "
            "`await client.compute(ddf)`"
        ) from error
    client = getattr(get, "__self__", None)
    return client if isinstance(client, Client) else None


def _client_in_use() -> Client | None:
    """The client that computes the query that is being lowered; None for another scheduler."""
    # Dask tells its expressions nothing of a computation: look at the arguments of its functions.
    scheduler, frame = None, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code in _BY_CLIENT:
            return frame.f_locals["self"]
        if frame.f_code in _BY_DASK:
            scheduler = frame.f_locals["scheduler"]
            break
    if scheduler is None and dask.config.get("scheduler", None) in (None, "dask.distributed"):
        return current_client()
    return client_that_computes(scheduler)
