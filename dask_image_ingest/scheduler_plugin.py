"""The part of a cluster's scheduler in tasks of this package.

A worker that can't import what a task is made of ends its connection, and with its last worker a
cluster waits for ever. So the scheduler asks each worker what it has installed, those that join
later before they get any task, and gives the others no part in graphs with tasks of this package.
It also tells a task that was with a worker when it died: see `crash_guard`.
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

#: The annotation of a task that was with a worker when it died.
HAS_KILLED: Final = "image-ingest-has-killed"

#: The topic of the scheduler's events that says which workers stay out.
WARNINGS: Final = "image-ingest-warnings"

# How pickle names a module of this package. A path of a file has something before the name.
_OURS = re.compile(rb"\x8c.dask_image_ingest[.\x94]", re.DOTALL)

_PATIENCE = 5.0  # seconds for the answers of workers that are there
_SILENT = "not answered yet"
_NOBODY = "nobody"  # the only address to which tasks are restricted while no worker is fit

_NAMED = 10  # workers in a message
_MOST_KILLERS = 10_000  # tasks that killed


class PrepareScheduler(SchedulerPlugin):
    """Keeps tasks of this package off workers that can't run them; marks those that killed one.

    Parameters
    ----------
    here
        The environment of the client: workers need its version of this package, and DALI if it has
        that.

    Attributes
    ----------
    found
        What each worker has installed, by its address; those that have answered.
    unfit
        Why workers can't run tasks of this package, by address.
    """

    name = "image-ingest"
    idempotent = True

    def __init__(self, here: Mapping[str, Any]) -> None:
        self._here = here
        self._patience = _PATIENCE  # of the client's process
        self.found: dict[str, Mapping[str, Any]] = {}
        self.unfit: dict[str, str] = {}
        # Shared by all tasks that are restricted: those that wait may go to whoever joins.
        self._fit = {_NOBODY}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        self._killers: dict[Key, None] = {}  # the oldest first
        self._scheduler: Scheduler

    async def start(self, scheduler: Scheduler) -> None:
        """Ask the workers that are there; called by dask."""
        self._scheduler = scheduler
        scheduler.add_plugin(self, idempotent=True)  # now, or a worker that joins now is missed
        for address in scheduler.workers:
            self._looks[address] = asyncio.create_task(self._look(address))
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=self._patience)
            self.unfit |= dict.fromkeys(self._looks, _SILENT)
            self._changed()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Ask a worker that joins, which answers as soon as it has; called by dask."""
        self._looks[worker] = asyncio.create_task(self._look(worker))

    def log_event(self, topic: str, msg: Any) -> None:
        """Hold a worker that is ready for tasks before it has answered; called by dask."""
        if topic in self._looks and isinstance(msg, dict) and msg.get("status") == "running":
            self._held.add(topic)
            self._scheduler.workers[topic].status = Status.paused

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a worker; called by dask."""
        if worker in self._looks:
            self._looks.pop(worker).cancel()
        self.found.pop(worker, None)
        self.unfit.pop(worker, None)
        self._held.discard(worker)
        self._changed()

    async def close(self) -> None:
        """End what is underway; called by dask."""
        for look in self._looks.values():
            look.cancel()

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        """Restrict the tasks of a graph where some workers can't run them; called by dask."""
        if self.unfit:
            self._restrict()
            asyncio.get_running_loop().call_soon(self._give_up)

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note a death, or mark a task that is about to be given out; called by dask."""
        if start == "processing":
            if finish == "memory":
                self._killers.pop(key, None)
            elif finish in ("released", "erred") and self._scheduler.tasks[key].suspicious:
                self._killers[key] = None
                if len(self._killers) > _MOST_KILLERS:
                    self._killers.pop(next(iter(self._killers)))
        elif finish == "waiting" and key in self._killers:
            task = self._scheduler.tasks[key]
            task.annotations = {**(task.annotations or {}), HAS_KILLED: True}

    def warning(self) -> str:
        """Sentences on the workers that stay out; empty if none does, or all that there are."""
        if not self.unfit or self.error():
            return ""
        return f"{self._described()} They get no tasks of queries with images"

    def error(self) -> str:
        """Reason why no worker can run tasks of this package; empty where one can or may."""
        if not self.unfit or self._fit != {_NOBODY} or self._looks:
            return ""
        return (
            f"{self._scheduler.address} can't run this query. {self._described()} Install "
            f"{PACKAGE} {self._here[PACKAGE]} with DALI where the workers run, as here, and start "
            "them again"
        )

    def _described(self) -> str:
        """A sentence for each reason that workers are unfit, with their hosts and addresses."""
        by_reason: dict[str, list[str]] = {}
        for address, reason in self.unfit.items():
            by_reason.setdefault(reason, []).append(address)
        return " ".join(self._sentence(reason, each) for reason, each in by_reason.items())

    def _sentence(self, reason: str, addresses: list[str]) -> str:
        named = [
            f"{self.found[address]['host']} ({address})" if address in self.found else address
            for address in addresses[:_NAMED]
        ]
        more = f" and {len(addresses) - _NAMED} more" if len(addresses) > _NAMED else ""
        have = "worker has" if len(addresses) == 1 else "workers have"
        return f"{len(addresses)} {have} {reason}: {', '.join(named)}{more}."

    async def _look(self, address: str) -> None:
        found = await self._ask(address)
        del self._looks[address]
        self.unfit.pop(address, None)
        if found is not None:
            self.found[address] = found
            if reason := self._reason(found):
                self.unfit[address] = reason
        self._changed()
        if address in self.unfit:
            self._restrict()
            if told := self.warning():
                self._scheduler.log_event(WARNINGS, told)
        worker = self._scheduler.workers[address]
        if address in self._held:
            self._held.remove(address)
            self._scheduler.handle_worker_status_change(Status.running, worker, _stimulus())
        else:
            waiting = self._scheduler.bulk_schedule_unrunnable_after_adding_worker(worker)
            self._scheduler.transitions(waiting, _stimulus())
        self._give_up()

    async def _ask(self, address: str) -> dict[str, Any] | None:
        """The environment of a worker; None where it runs no functions of others."""
        question = dumps(Portable(environment))
        while True:
            try:
                async with rpc(address, connection_args=self._scheduler.connection_args) as worker:
                    answer = await worker.run(function=question)
                return answer["result"] if answer["status"] == "OK" else None
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

    def _changed(self) -> None:
        fit = self._scheduler.workers.keys() - self.unfit.keys() - self._looks.keys()
        self._fit.clear()
        self._fit.update(fit or {_NOBODY})

    def _restrict(self) -> None:
        """Restrict all tasks of graphs with tasks of this package to the workers that are fit."""
        queued = {}
        for task in tasks_of_this_package(self._scheduler):
            if task.worker_restrictions or task.host_restrictions:
                continue  # the user's, or of a shuffle that has begun
            task.worker_restrictions = self._fit
            if task.state == "queued":  # by which dask would not look at it
                queued[task.key] = "released"
        self._scheduler.transitions(queued, _stimulus())

    def _give_up(self) -> None:
        """Fail tasks that no worker can run."""
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
    """All tasks of graphs in which tasks of this package have a part."""
    tasks = defaultdict(list)
    near = defaultdict(set)
    for task in scheduler.tasks.values():
        tasks[task.group].append(task)
    for group in tasks:
        for other in group.dependencies:
            near[group].add(other)
            near[other].add(group)
    left = [group for group, its in tasks.items() if _OURS.search(dumps(its[0].run_spec))]
    seen = set()
    while left:
        group = left.pop()
        if group not in seen:
            seen.add(group)
            left += near[group]
            yield from tasks.get(group, ())


def _stimulus() -> str:
    return f"image-ingest-{time.time()}"


class Told(NamedTuple):
    """Answer of a scheduler about its workers.

    Attributes
    ----------
    found
        What those that have answered have installed, by address.
    warning, error
        Which of them get no tasks of this package; why none can run them.
    """

    found: Mapping[str, Mapping[str, Any]]
    warning: str
    error: str


_prepared: WeakSet[Client] = WeakSet()
_PROCESS = os.getpid()


def prepare_scheduler_in_use() -> None:
    """Prepare the scheduler of the client in use, once; warn of workers that stay out.

    An asynchronous client does so as soon as its loop can.

    Raises
    ------
    ClusterError
        If the scheduler lacks this package, or has another version of it.
    """
    client = _client_in_use()
    if client is None or client in _prepared:
        return
    if client.asynchronous:
        _prepared.add(client)
        client.subscribe_topic(WARNINGS, _warn)
        client.loop.add_callback(_prepare_scheduler, client)
    elif told := prepare_scheduler(client).warning:
        warnings.warn(told, stacklevel=2)


def prepare_scheduler(client: Client) -> Told:
    """Prepare the scheduler of a client for tasks of this package, and ask it about its workers.

    Raises
    ------
    ClusterError
        If the scheduler lacks this package, or has another version of it.
    """
    told: Told = client.sync(_prepare_scheduler, client)
    if client not in _prepared:
        _prepared.add(client)
        client.subscribe_topic(WARNINGS, _warn)
    return told


async def _prepare_scheduler(client: Client) -> Told:
    here = environment()
    try:
        there = await client.run_on_scheduler(Portable(environment))
    except ValueError:  # it may be configured to run no functions of clients
        await client.register_plugin(PrepareScheduler(here))
        return Told({}, "", "")
    if there[PACKAGE] != here[PACKAGE]:
        has = f"{PACKAGE} {there[PACKAGE]}" if there[PACKAGE] else f"no {PACKAGE}"
        raise ClusterError(
            f"The scheduler {client.scheduler.address}, on {there['host']}, has {has}. Install "
            f"{here[PACKAGE]} there, as here, and start it again"
        )
    await client.register_plugin(PrepareScheduler(here))
    told: Told = await client.run_on_scheduler(_tell)
    return told


def _tell(dask_scheduler: Scheduler) -> Told:
    plugin = dask_scheduler.plugins[PrepareScheduler.name]
    assert isinstance(plugin, PrepareScheduler)
    return Told(plugin.found, plugin.warning(), plugin.error())


def _client_in_use() -> Client | None:
    if os.getpid() != _PROCESS:  # a fork has the client of its parent, and not its event loop
        return None
    chosen = dask.config.get("scheduler", None)
    if isinstance(chosen, Client):
        return chosen
    try:
        return Client.current()
    except ValueError:
        return None


def _warn(event: tuple[float, str]) -> None:
    warnings.warn(event[1], stacklevel=2)
