"""Scheduler plugin that keeps tasks of this package off workers that can't run them.

A worker that can't unpickle a task closes its connection, and when the last one has, the cluster
hangs. So the scheduler asks each worker which packages it has; a worker that joins later gets no
task before it has answered. Graphs with tasks of this package are restricted to the workers that
have it. The plugin also marks tasks that were on a worker when it died: see `crash_guard`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import dask
from dask.typing import Key
from distributed import Client, Scheduler, SchedulerPlugin, Status, rpc
from distributed.protocol.pickle import dumps

from dask_image_ingest.environment import PACKAGE, Portable, environment
from dask_image_ingest.errors import ClusterError

#: Annotation of a task that was on a worker when it died.
HAS_KILLED: Final = "image-ingest-has-killed"

#: Topic of the scheduler's events about excluded workers.
WARNINGS: Final = "image-ingest-warnings"

# A module of this package in a pickle: opcode and length, then the name. In a file's path, other
# characters come before the name.
_OUR_MODULE = re.compile(rb"\x8c.dask_image_ingest[.\x94]", re.DOTALL)

_PATIENCE = 5.0  # seconds to wait for the answers of present workers
_SILENT = "not answered yet"
_NOBODY = "nobody"  # address that tasks are restricted to while no worker is fit

_MAX_NAMED = 10  # workers listed in a message
_MAX_SUSPECTS = 10_000


class PrepareScheduler(SchedulerPlugin):
    """Keep tasks of this package off workers that can't run them; mark tasks that killed a worker.

    Parameters
    ----------
    here
        The client's `environment`. Workers need its version of this package, and DALI if it has
        DALI.

    Attributes
    ----------
    found
        Environment by address, of the workers that have answered.
    unfit
        Reason by address, of the workers that can't run tasks of this package.
    """

    name = "image-ingest"
    idempotent = True

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._here = here
        self._patience = _PATIENCE  # as configured in the client's process
        self.found: dict[str, Mapping[str, Any]] = {}
        self.unfit: dict[str, str] = {}
        # Addresses of fit workers: one set, shared by all restricted tasks, so that those that wait
        # can run on a worker that joins.
        self._fit = {_NOBODY}
        # Requests to workers that have not answered yet.
        self._requests: dict[str, asyncio.Task[None]] = {}
        # Workers that are paused until they have answered.
        self._held: set[str] = set()
        # Tasks that were on a worker when it died, oldest first.
        self._suspects: dict[Key, None] = {}
        self._scheduler: Scheduler

    async def start(self, scheduler: Scheduler) -> None:
        """Ask the present workers; called by Dask."""
        self._scheduler = scheduler
        # Dask adds it after start(), and a worker that joins in between would be missed.
        scheduler.add_plugin(self, idempotent=True)
        for address in scheduler.workers:
            self._requests[address] = asyncio.create_task(self._check_worker(address))
        if self._requests:
            await asyncio.wait(self._requests.values(), timeout=self._patience)
            self.unfit |= dict.fromkeys(self._requests, _SILENT)
            self._update_fit()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Ask a worker that joins; called by Dask."""
        self._requests[worker] = asyncio.create_task(self._check_worker(worker))

    def log_event(self, topic: str, msg: Any) -> None:
        """Pause a worker that starts to run before it has answered; called by Dask."""
        if topic in self._requests and isinstance(msg, dict) and msg.get("status") == "running":
            self._held.add(topic)
            self._scheduler.workers[topic].status = Status.paused

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker; called by Dask."""
        if worker in self._requests:
            self._requests.pop(worker).cancel()
        self.found.pop(worker, None)
        self.unfit.pop(worker, None)
        self._held.discard(worker)
        self._update_fit()

    async def close(self) -> None:
        """Cancel pending requests; called by Dask."""
        for request in self._requests.values():
            request.cancel()

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        """Restrict the tasks of a new graph if some workers are unfit; called by Dask."""
        if self.unfit:
            self._restrict()
            asyncio.get_running_loop().call_soon(self._fail_unrunnable)

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

    def warning(self) -> str:
        """Warning about the excluded workers; empty if there are none, or no others (`error`)."""
        if not self.unfit or self.error():
            return ""
        return f"{self._reasons()} They get no tasks of queries with images"

    def error(self) -> str:
        """Reason why no worker can run tasks of this package; empty if one can, or may yet."""
        if not self.unfit or self._fit != {_NOBODY} or self._requests:
            return ""
        return (
            f"{self._scheduler.address} can't run this query. {self._reasons()} Install "
            f"{PACKAGE} {self._here[PACKAGE]} with DALI where the workers run, as here, and start "
            "them again"
        )

    def _reasons(self) -> str:
        """One sentence per reason that workers are unfit, with their hosts and addresses."""
        by_reason: dict[str, list[str]] = {}
        for address, reason in self.unfit.items():
            by_reason.setdefault(reason, []).append(address)
        return " ".join(self._sentence(reason, workers) for reason, workers in by_reason.items())

    def _sentence(self, reason: str, addresses: list[str]) -> str:
        names = [
            f"{self.found[address]['host']} ({address})" if address in self.found else address
            for address in addresses[:_MAX_NAMED]
        ]
        more = f" and {len(addresses) - _MAX_NAMED} more" if len(addresses) > _MAX_NAMED else ""
        have = "worker has" if len(addresses) == 1 else "workers have"
        return f"{len(addresses)} {have} {reason}: {', '.join(names)}{more}."

    async def _check_worker(self, address: str) -> None:
        """Ask a worker for its environment, then let it run tasks or exclude it."""
        found = await self._environment_of(address)
        del self._requests[address]
        self.unfit.pop(address, None)
        if found is not None:
            self.found[address] = found
            if reason := self._reason(found):
                self.unfit[address] = reason
        self._update_fit()
        if address in self.unfit:
            self._restrict()
            if warning := self.warning():
                self._scheduler.log_event(WARNINGS, warning)
        worker = self._scheduler.workers[address]
        if address in self._held:
            self._held.remove(address)
            self._scheduler.handle_worker_status_change(Status.running, worker, _stimulus())
        else:
            runnable = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(worker)
            self._scheduler.transitions(runnable, _stimulus())
        self._fail_unrunnable()

    async def _environment_of(self, address: str) -> dict[str, Any] | None:
        """The environment of a worker; None if it is configured to run no functions."""
        function = dumps(Portable(environment))
        while True:
            try:
                async with rpc(address, connection_args=self._scheduler.connection_args) as worker:
                    reply = await worker.run(function=function)
                return reply["result"] if reply["status"] == "OK" else None
            except OSError:
                await asyncio.sleep(1)
            except Exception:
                return None

    def _reason(self, found: Mapping[str, Any]) -> str:
        """Reason why a worker can't run tasks of this package; empty if it can."""
        if found[PACKAGE] is None:
            return f"no {PACKAGE}"
        if found[PACKAGE] != self._here[PACKAGE]:
            return f"{PACKAGE} {found[PACKAGE]} (here {self._here[PACKAGE]})"
        return "no DALI" if self._here["dali"] and not found["dali"] else ""

    def _update_fit(self) -> None:
        fit = self._scheduler.workers.keys() - self.unfit.keys() - self._requests.keys()
        # In place, as tasks hold the set.
        self._fit.clear()
        self._fit.update(fit or {_NOBODY})

    def _restrict(self) -> None:
        """Restrict all tasks of graphs with tasks of this package to fit workers."""
        queued = {}
        for task in tasks_of_this_package(self._scheduler):
            if task.worker_restrictions or task.host_restrictions:
                continue  # restrictions of the user, or of a running P2P shuffle
            task.worker_restrictions = self._fit
            if task.state == "queued":  # Dask ignores restrictions of queued tasks
                queued[task.key] = "released"
        self._scheduler.transitions(queued, _stimulus())

    def _fail_unrunnable(self) -> None:
        """Fail tasks of this package if no worker can run them."""
        if not self.error():
            return
        error = dumps(ClusterError(self.error()))
        failed: dict[Key, Any] = {}
        for task in [*self._scheduler.unrunnable]:
            if task.worker_restrictions is self._fit:
                failed |= self._scheduler.transition(
                    task.key, "erred", _stimulus(), exception=error, cause=task.key
                )
        self._scheduler.transitions(failed, _stimulus())


def tasks_of_this_package(scheduler: Scheduler) -> Iterator[Any]:
    """All tasks that are connected, through their groups, with a task of this package."""
    tasks = defaultdict(list)
    neighbours = defaultdict(set)
    for task in scheduler.tasks.values():
        tasks[task.group].append(task)
    for group in tasks:
        for dependency in group.dependencies:
            neighbours[group].add(dependency)
            neighbours[dependency].add(group)
    # The tasks of a group run the same function: look at one of them.
    stack = [group for group, its in tasks.items() if _OUR_MODULE.search(dumps(its[0].run_spec))]
    seen = set()
    while stack:
        group = stack.pop()
        if group not in seen:
            seen.add(group)
            stack += neighbours[group]
            yield from tasks.get(group, ())


def _stimulus() -> str:
    return f"image-ingest-{time.time()}"


class WorkerReport(NamedTuple):
    """A scheduler's report on its workers; fields as in `PrepareScheduler`."""

    found: Mapping[str, Mapping[str, Any]]
    warning: str
    error: str


# Clients whose scheduler has been prepared.
_prepared: WeakSet[Client] = WeakSet()
_PROCESS = os.getpid()


def prepare_scheduler_in_use() -> None:
    """Prepare the scheduler of the current client, once; warn of excluded workers.

    With an asynchronous client, both are done later, in its event loop.

    Raises
    ------
    ClusterError
        If the scheduler lacks this package, or has another version of it.
    """
    client = _current_client()
    if client is None or client in _prepared:
        return
    if client.asynchronous:
        _prepared.add(client)
        client.subscribe_topic(WARNINGS, _warn)
        client.loop.add_callback(_prepare_scheduler, client)
    elif warning := prepare_scheduler(client).warning:
        warnings.warn(warning, stacklevel=2)


def prepare_scheduler(client: Client) -> WorkerReport:
    """Register the plugin with a client's scheduler, and get its report on the workers.

    Raises
    ------
    ClusterError
        If the scheduler lacks this package, or has another version of it.
    """
    report: WorkerReport = client.sync(_prepare_scheduler, client)
    if client not in _prepared:
        _prepared.add(client)
        client.subscribe_topic(WARNINGS, _warn)
    return report


async def _prepare_scheduler(client: Client) -> WorkerReport:
    here = environment()
    try:
        there = await client.run_on_scheduler(Portable(environment))
    except ValueError:  # the scheduler may be configured to run no functions
        await client.register_plugin(PrepareScheduler(here))
        return WorkerReport({}, "", "")
    if there[PACKAGE] != here[PACKAGE]:
        has = f"{PACKAGE} {there[PACKAGE]}" if there[PACKAGE] else f"no {PACKAGE}"
        raise ClusterError(
            f"The scheduler {client.scheduler.address}, on {there['host']}, has {has}. Install "
            f"{here[PACKAGE]} there, as here, and start it again"
        )
    await client.register_plugin(PrepareScheduler(here))
    report: WorkerReport = await client.run_on_scheduler(_report)
    return report


def _report(dask_scheduler: Scheduler) -> WorkerReport:
    plugin = dask_scheduler.plugins[PrepareScheduler.name]
    assert isinstance(plugin, PrepareScheduler)
    return WorkerReport(plugin.found, plugin.warning(), plugin.error())


def _current_client() -> Client | None:
    if os.getpid() != _PROCESS:  # a fork has its parent's client, but not its event loop
        return None
    configured = dask.config.get("scheduler", None)
    if isinstance(configured, Client):
        return configured
    try:
        return Client.current()
    except ValueError:
        return None


def _warn(event: tuple[float, str]) -> None:
    warnings.warn(event[1], stacklevel=2)
