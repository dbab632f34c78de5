"""Versions of installed packages; the current Dask client, and whether its workers have the same.

Before a client's first query with images, the versions of this package on all workers are compared
with that of this process, and the scheduler gets the plugin that the crash guard needs. A worker
that comes later with another version is refused by the task itself: see `refuse_other_version`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from typing import Any, Final
from weakref import WeakSet

from dask.base import get_scheduler
from dask.typing import Key
from distributed import Client, Scheduler, SchedulerPlugin, get_worker
from distributed.system import MEMORY_LIMIT

from dask_image_ingest.errors import ClusterError

#: Key of this package in :func:`environment`.
PACKAGE = "dask-image-ingest"

_DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")
_CUDF = ("cudf-cu13", "cudf-cu12", "cudf")


class Versions(dict[str, str | None]):
    """Versions by name, None if not installed. The repr has one line for each."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {version or '-'}" for name, version in self.items())


def versions() -> Versions:
    """Versions of this package and of those that it uses, for bug reports.

    Returns
    -------
    Versions
        A dict by name, printed with one line for each.

    Examples
    --------
    >>> "dask" in versions()
    True
    """
    packages = {name: v for name, v in environment().items() if name not in ("host", "cores")}
    return Versions({"platform": platform.platform(), **packages})


def own_version() -> str:
    """Version of this package in this process."""
    version: str = importlib.import_module(__package__).__version__
    return version


def refuse_other_version(version: str) -> None:
    """Refuse a task that was planned with another version of this package."""
    if version != own_version():
        raise ClusterError(
            f"a task of {PACKAGE} {version} has come to a process that has {own_version()}: "
            "install the same version everywhere, and start workers again"
        )


def environment() -> dict[str, Any]:
    """Host name, cores, and versions of Python and packages; None if not installed."""
    names = ("dask", "distributed", "pandas", "numpy", "pyarrow", "fsspec", "pillow")
    return {
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        PACKAGE: own_version(),
        "dali": _dali_version(),
        **{name: _version(name) for name in names},
        "cudf": _version(*_CUDF),
    }


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _dali_version() -> str | None:
    try:
        found = importlib.util.find_spec("nvidia.dali")
    except ImportError:
        return None
    return None if found is None else _version(*_DALI) or "unknown"


#: Annotation of a task during which a worker died.
HAS_KILLED: Final = "image-ingest-has-killed"

_MAX_NAMED = 10  # workers listed in a message

_checked: WeakSet[Client] = WeakSet()
_PROCESS = os.getpid()


class MarkSuspects(SchedulerPlugin):
    """Annotates tasks during which a worker died: only the scheduler knows them."""

    name = "image-ingest"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Called by Dask."""
        self._tasks = scheduler.tasks

    def transition(
        self, key: Key, start: str, finish: str, *args: object, **kwargs: object
    ) -> None:
        """Annotate a task before it is tried again; called by Dask."""
        if finish == "waiting" and (task := self._tasks[key]).suspicious:
            task.annotations = {**(task.annotations or {}), HAS_KILLED: True}


def check_workers() -> None:
    """Check the workers of the client that computes, once per client.

    Raises
    ------
    ClusterError
        As `check_client`.
    """
    try:
        client = client_that_computes()
    except RuntimeError:  # an asynchronous client can't wait
        return
    if client is not None and client not in _checked and not client.asynchronous:
        check_client(client)


def check_client(client: Client) -> dict[str, dict[str, Any]]:
    """Compare the version of this package on all workers with that of this process.

    Returns
    -------
    dict
        `environment` of each worker by address.

    Raises
    ------
    ClusterError
        Naming the workers that lack this package or have another version of it.
    """
    answers: dict[str, Any] = client.run(environment, on_error="return")
    found, unfit = dict[str, dict[str, Any]](), dict[str, str]()
    for address, there in answers.items():
        if isinstance(there, dict):
            found[address] = there
            if there[PACKAGE] != own_version():
                unfit[f"{there['host']} ({address})"] = there[PACKAGE]
        elif not isinstance(there, OSError):  # of a worker that has left meanwhile
            unfit[address] = str(there)
    if unfit:
        named = [f"{worker}: {reason}" for worker, reason in unfit.items()]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        raise ClusterError(
            f"this process has {PACKAGE} {own_version()}, and {len(named)} of {len(answers)} "
            f"workers have not: {', '.join(named[:_MAX_NAMED])}{more}. Install it there, and start "
            "them again, or close them: client.retire_workers([...])"
        )
    client.register_plugin(MarkSuspects())
    _checked.add(client)
    return found


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """The scheduler's information on each worker, by address.

    Not by `Client.scheduler_info`: before it returns, the client's periodic update may replace what
    it has asked for by totals without workers.
    """
    workers: dict[str, dict[str, Any]]
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def current_client() -> Client | None:
    """The current client of this process; None without one, or if it is asynchronous."""
    if os.getpid() != _PROCESS:  # a fork has its parent's client, but not its event loop
        return None
    try:
        client = Client.current()
    except ValueError:
        return None
    return None if client._asynchronous else client


def client_that_computes() -> Client | None:
    """The client on which Dask would compute now; None if it would compute in this process.

    Raises
    ------
    RuntimeError
        Dask's own, if the client is asynchronous.
    """
    if os.getpid() != _PROCESS:
        return None
    client = getattr(get_scheduler(), "__self__", None)
    return client if isinstance(client, Client) else None


def workers() -> list[dict[str, Any]] | None:
    """The scheduler's information on each worker; None without a client that may be asked."""
    client = current_client()
    if client is None:
        return None
    try:
        return [*workers_of(client).values()]
    except OSError:  # the scheduler has ended
        return []


# Assumed memory of workers without a limit.
_ASSUMED_MEMORY = 8 << 30


def worker_memory() -> int:
    """Memory limit of this worker, in bytes; in a client, the smallest of its workers'."""
    try:
        return get_worker().memory_manager.memory_limit or MEMORY_LIMIT
    except ValueError:  # this is the client, which plans for its workers
        pass
    limits = [worker["memory_limit"] for worker in workers() or ()]
    # With workers, the memory of this machine is irrelevant: it may be a login node.
    default = _ASSUMED_MEMORY if limits else MEMORY_LIMIT
    return min((limit for limit in limits if limit), default=default)
