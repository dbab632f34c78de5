"""A look at a cluster's workers before they get the first task of this package.

A worker that can't import what a task is made of closes its connection to the scheduler, and the
task waits for ever. So clients ask first, by a function that needs nothing but Python.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client
from distributed.comm import get_address_host
from distributed.protocol import Serialized, serialize
from distributed.worker import thread_state

from dask_image_ingest.cluster.environment import Portable, environment
from dask_image_ingest.decode import CrashJournal
from dask_image_ingest.errors import ClusterError

PACKAGE = "dask-image-ingest"
SCHEDULER = "the scheduler"

# How pickle names a module of this package. A path of a file has something before the name.
_OURS = re.compile(rb"\x8c.dask_image_ingest[.\x94]", re.DOTALL)

_SECONDS_BETWEEN = 5.0  # from one list of a client's workers to the next
_NAMED = 10  # workers in a message
_TIMEOUT = 30.0  # for the answers of all workers


class _Looked:
    """A client's knowledge of its workers.

    ``fit`` are the addresses of those that can run tasks of this package.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fit: set[str] = set()
        self.hosts: list[str] | None = None  # to which tasks are restricted; None for all
        self.until = 0.0
        self.warned = ""


_looked: WeakKeyDictionary[Client, _Looked] = WeakKeyDictionary()


def install() -> None:
    """Make each client check its workers before it sends a graph with tasks of this package."""
    send = Client._graph_to_futures

    @functools.wraps(send)
    def send_checked(
        self: Client, expr: Any, keys: Any, *args: Any, workers: Any = None, **kwargs: Any
    ) -> Any:
        # An asynchronous client can't wait here, and a task runs where its package is.
        if not self.asynchronous and getattr(thread_state, "key", None) is None and _is_due(self):
            expr = Serialized(*serialize(expr, on_error="raise"))
            if any(_OURS.search(frame) for frame in expr.frames):
                hosts = check(self)
                workers = hosts if workers is None else workers
        return send(self, expr, keys, *args, workers=workers, **kwargs)

    Client._graph_to_futures = send_checked


def check(client: Client) -> list[str] | None:
    """Ask the workers that are new to this client what they have installed.

    The first time the scheduler gets a journal of crashes too.

    Returns
    -------
    list of str, or None
        The hosts whose workers can all run tasks of this package, where others can't; None where
        all can.

    Raises
    ------
    ClusterError
        If the scheduler or all workers lack this package, or DALI where this process has it, or
        have another version of the package; and if workers of each host do.
    """
    looked = _looked.setdefault(client, _Looked())
    with looked.lock:
        present = client.scheduler_info(n_workers=-1)["workers"]
        looked.fit.intersection_update([*present, SCHEDULER])
        found = _environments(client, [each for each in present if each not in looked.fit])
        if SCHEDULER not in looked.fit:
            with suppress(ValueError):  # it may be configured to run no functions of clients
                found[SCHEDULER] = client.run_on_scheduler(Portable(environment))
        reasons = unfit(found)
        looked.hosts = _hosts(client, present, found, reasons)
        if SCHEDULER in found:
            client.register_plugin(CrashJournal())
        if reasons and (text := _described(found, reasons)) != looked.warned:
            looked.warned = text
            warnings.warn(
                f"{text} They get no tasks of this query, nor do other workers of their hosts",
                stacklevel=2,
            )
        # Those too that gave no answer: they may be busy, and each query would wait for them.
        looked.fit.update(address for address in present if address not in reasons)
        looked.fit.add(SCHEDULER)
        looked.until = time.monotonic() + _SECONDS_BETWEEN
        return looked.hosts


def unfit(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Why processes can't run tasks of this process, by address; without those that can."""
    here = environment()
    reasons = {}
    for address, there in found.items():
        if there[PACKAGE] is None:
            reasons[address] = f"no {PACKAGE}"
        elif there[PACKAGE] != here[PACKAGE]:
            reasons[address] = f"{PACKAGE} {there[PACKAGE]} (here {here[PACKAGE]})"
        elif there["dali"] is None and here["dali"] is not None and address != SCHEDULER:
            reasons[address] = "no DALI"
    return reasons


def _is_due(client: Client) -> bool:
    looked = _looked.get(client)
    return looked is None or looked.hosts is not None or time.monotonic() >= looked.until


def _environments(client: Client, addresses: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The packages of each worker; those that can't answer are left out."""
    if not addresses:
        return {}
    try:
        answers = client.run(
            Portable(environment),
            workers=[*addresses],
            on_error="return",
            callback_timeout=_TIMEOUT,
        )
    except TimeoutError:
        return {}
    return {
        address: answer for address, answer in answers.items() if not isinstance(answer, Exception)
    }


def _hosts(
    client: Client,
    present: Sequence[str],
    found: Mapping[str, Mapping[str, Any]],
    reasons: Mapping[str, str],
) -> list[str] | None:
    if not reasons:
        return None
    # By host, since a worker has another address when its nanny has restarted it.
    avoided = {get_address_host(address) for address in reasons if address != SCHEDULER}
    hosts = sorted({get_address_host(address) for address in present} - avoided)
    if SCHEDULER in reasons or not hosts:
        version = environment()[PACKAGE]
        raise ClusterError(
            f"{client.scheduler.address} can't run this query. {_described(found, reasons)} "
            f"Install {PACKAGE} {version} with DALI where the scheduler and the workers run, as "
            "here, and start them again"
        )
    return hosts


def _described(found: Mapping[str, Mapping[str, Any]], reasons: Mapping[str, str]) -> str:
    """A sentence for each reason, with hosts and addresses of those that have it."""
    by_reason: dict[str, list[str]] = {}
    for address, reason in reasons.items():
        by_reason.setdefault(reason, []).append(address)
    sentences = []
    for reason, addresses in by_reason.items():
        workers = [address for address in addresses if address != SCHEDULER]
        if SCHEDULER in addresses:
            sentences.append(f"The scheduler, on {found[SCHEDULER]['host']}, has {reason}.")
        if workers:
            named = [f"{found[address]['host']} ({address})" for address in workers[:_NAMED]]
            more = f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else ""
            have = "worker has" if len(workers) == 1 else "workers have"
            sentences.append(f"{len(workers)} {have} {reason}: {', '.join(named)}{more}.")
    return " ".join(sentences)
