"""Backends: what a dataframe library has to offer, and which one a collection gets."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.decode import PixelBuffer, Pixels
from dask_image_ingest.errors import MissingDependencyError

BackendName = Literal["cudf", "pandas"]

#: The values of a new column, and its type: an array (n,), for a list type (n, d), or a Python list
#: of strings or bytes.
NewColumn: TypeAlias = tuple[Any, pa.DataType]


class Backend(Protocol):
    """Protocol of a dataframe library; ``pandas_backend.py`` and ``cudf/backend.py`` have it."""

    @property
    def name(self) -> BackendName:
        """The name that ``backend=`` takes."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Device that decodes images."""

    @property
    def largest_partition(self) -> int:
        """The most pixels, in bytes, that the image column of one partition can hold."""

    @property
    def numpy(self) -> Any:
        """The library of its arrays, with NumPy's names: NumPy or CuPy."""

    def holds(self, type_: pa.DataType) -> bool:
        """True if a column can be of this type, of those that the metadata of a read may have."""

    def thread_setup(self) -> Callable[[], None]:
        """Function that another thread calls first, to work on the device of this one."""

    def pixel_buffer(self, nbytes: int) -> PixelBuffer:
        """A buffer for about ``nbytes`` of pixels."""

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> Any:
        """A dataframe of ``table``'s columns, and ``image`` last where there are pixels."""

    def to_arrow(self, frame: Any) -> pa.Table:
        """Metadata columns of a dataframe, on the host."""

    def to_storage(self, frame: Any) -> pa.Table:
        """All columns of a dataframe, and its index, on the host and as files can have them."""

    def from_storage(self, table: pa.Table, meta: Any) -> Any:
        """A dataframe that was stored, or some columns of it; ``meta`` is an empty one like it."""

    def with_images(
        self, frame: Any, pixels: Pixels, image: str = "image", error: str | None = "error"
    ) -> Any:
        """``frame`` with the columns of a late decode, in place of those it has or behind.

        ``image`` and ``error`` are their names, ``error`` None where none is wanted.
        """

    def with_references(
        self, frame: Any, references: pa.Array | pa.ChunkedArray, image: str, error: str | None
    ) -> Any:
        """``frame`` with references in place of images, and nulls in place of errors.

        As with `with_images`; ``references`` are of the type ``REFERENCE``.
        """

    def is_references(self, dtype: Any) -> bool:
        """True for the dtype of image references."""

    def meta(self, types: Mapping[str, pa.DataType]) -> Any:
        """An empty dataframe with these columns."""

    def is_images(self, dtype: Any) -> bool:
        """True for the dtype of decoded images."""

    def arrays(self, images: Any) -> list[Any]:
        """Views of each image of a column, (height, width, channels), None where there is none."""

    def with_columns(
        self, frame: Any, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> Any:
        """``frame`` with new columns, whose values belong to ``rows``; null in the others."""

    def values(self, series: Any) -> Any:
        """A column as an array: (n,), or (n, d) of lists; strings and bytes as NumPy objects.

        None where nulls, or lists of differing lengths, don't allow that.
        """

    def normalized(self, images: Sequence[Any], scale: np.ndarray, shift: np.ndarray) -> Any:
        """Images of one shape as one array (n, channels, height, width) of float32.

        ``scale`` and ``shift`` are float32, one for each channel or one for all: what each value
        is multiplied by, and what is added then.
        """

    def count_levels(self, images: Sequence[Any]) -> np.ndarray:
        """Number of pixels by channel and value: int64 (channels, 256).

        All images are of as many channels.
        """

    def host(self, array: Any) -> np.ndarray:
        """An array in host memory."""

    def partition_memory(self) -> int:
        """Bytes of pixels that a partition should hold at most, judged by the memory here."""


Kind = Literal["dataframe", "series"]
Accessor = TypeVar("Accessor", bound=type)

# How a backend takes an accessor of a kind and a name.
Attach: TypeAlias = Callable[[Kind, str, type], None]

# All accessors, and how each loaded backend takes one: no backend has to know of any.
_accessors: dict[tuple[Kind, str], type] = {}
_attaching: dict[BackendName, Attach] = {}


def register_accessor(kind: Kind, name: str) -> Callable[[Accessor], Accessor]:
    """Class decorator: an accessor on what every backend has of this kind, once it is loaded.

    pandas' own, which are always there, are for whoever defines the accessor.
    """

    def register(accessor: Accessor) -> Accessor:
        _accessors[kind, name] = accessor
        for attach in _attaching.values():
            attach(kind, name, accessor)
        return accessor

    return register


def attach_accessors(backend: BackendName, attach: Attach) -> None:
    """Say how a backend that has just been loaded takes an accessor."""
    _attaching[backend] = attach
    for (kind, name), accessor in _accessors.items():
        attach(kind, name, accessor)


def gpus() -> int:
    """Number of GPUs for a cuDF backend on this machine; 0 without cuDF."""
    if importlib.util.find_spec("cudf") is None or importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def require_gpu() -> None:
    """Refuse to make a cuDF frame in a process without a GPU."""
    if not gpus():
        raise MissingDependencyError(
            "backend='cudf' needs a GPU, and CUDA finds none in this process. Compute on the "
            "workers of a cluster that have one, and take the result as pandas, "
            "ddf.to_backend('pandas').compute(); or read with backend='pandas'"
        )


_is_fork = False


def is_fork() -> bool:
    """True in a forked process, which has its parent's client but not its event loop.

    Calls of that client would never return.
    """
    return _is_fork


def workers() -> list[dict[str, Any]]:
    """The workers as the scheduler knows them; none without a client."""
    return _known_workers() or []


def awaits_workers() -> bool:
    """True if there is a client, and no worker has joined its cluster yet."""
    return _known_workers() == []


def planned_workers() -> int:
    """The number of workers that there should be, where the client has started their cluster."""
    from distributed.client import default_client

    if _is_fork:
        return 0
    try:
        cluster = default_client().cluster
    except ValueError:
        return 0
    return 0 if cluster is None else len(cluster.plan)


def _known_workers() -> list[dict[str, Any]] | None:
    from distributed.client import default_client

    if _is_fork:
        return None
    try:
        return [*default_client().scheduler_info(n_workers=-1)["workers"].values()]
    except ValueError:
        return None


def _forked() -> None:
    global _is_fork
    _is_fork = True


os.register_at_fork(after_in_child=_forked)
