"""Checks of the arguments of ``start_cluster``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from dask.utils import parse_bytes
from distributed import LocalCluster, Nanny, Worker

from dask_image_ingest.arguments import whole_number
from dask_image_ingest.errors import ArgumentError

_NUMBERS = ("n_workers", "decode_threads", "threads_per_worker")
_SIZES = ("rmm_pool_size", "device_memory_limit", "memory_limit")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse numbers of workers and threads that are not positive, and sizes that are none.

    Raises
    ------
    ArgumentError
    """
    for name in _NUMBERS:
        if arguments.get(name) is not None:
            advice = "pass a positive number, or None for the usual one"
            whole_number(name, arguments[name], 1, advice)
    for name in _SIZES:
        _check_size(name, arguments.get(name))
    gpu, address = arguments.get("gpu"), arguments.get("dashboard_address")
    if not isinstance(gpu, (bool, type(None))):
        raise ArgumentError(f"gpu={gpu!r}; pass True, False, or None for what the machine has")
    if not isinstance(address, (str, int, type(None))):
        raise ArgumentError(f"dashboard_address={address!r}; pass ':8787', or None")


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuse keywords that neither the cluster nor its workers take, as workers would not start.

    Raises
    ------
    ArgumentError
    """
    takes = [inspect.signature(kind).parameters for kind in (LocalCluster, Nanny, Worker)]
    unknown = [name for name in settings if not any(name in known for known in takes)]
    if unknown:
        raise ArgumentError(
            f"start_cluster has no argument {', '.join(map(repr, unknown))}, and neither have "
            "distributed's LocalCluster, Nanny and Worker"
        )


def _check_size(name: str, value: Any) -> None:
    """Refuse what is neither a size (``"20 GB"``), a fraction, nor a keyword of dask."""
    if value is None or (isinstance(value, str) and value in ("auto", "default")):
        return
    try:
        number = parse_bytes(value) if isinstance(value, str) else float(value)
    except (ValueError, TypeError):
        number = -1
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ArgumentError(f"{name}={value!r}; pass bytes, such as '20 GB', or a share below 1")
