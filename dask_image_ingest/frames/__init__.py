"""Which dataframe library a collection's partitions are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import dask
import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import check_choice
from dask_image_ingest.decode import PixelBuffer, Pixels
from dask_image_ingest.errors import MissingDependencyError

BackendName = Literal["cudf", "pandas"]

# Accessors by name, and how each loaded backend takes one: no backend has to know of any.
_accessors: dict[str, type] = {}
_attaching: dict[BackendName, Callable[[str, type], None]] = {}

#: The values of a new column, and its type: an array (n,), for a list type (n, d), or a Python list
#: of strings or bytes.
NewColumn: TypeAlias = tuple[Any, pa.DataType]


class Backend(Protocol):
    """What a dataframe library has to do for this package; ``pandas.py`` and ``cudf.py`` do it."""

    @property
    def name(self) -> BackendName:
        """The name that ``backend=`` takes."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Where images are decoded."""

    @property
    def largest_partition(self) -> int:
        """The most pixels, in bytes, that the image column of one partition can hold."""

    @property
    def numpy(self) -> Any:
        """The library of its arrays, with NumPy's names: NumPy or CuPy."""

    def pixel_buffer(self, nbytes: int) -> PixelBuffer:
        """A buffer for about ``nbytes`` of pixels."""

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> Any:
        """A dataframe of ``table``'s columns, and ``image`` last where there are pixels."""

    def to_arrow(self, frame: Any) -> pa.Table:
        """Metadata columns of a dataframe, on the host."""

    def with_images(self, frame: Any, pixels: Pixels) -> Any:
        """``frame`` with the columns ``error`` and ``image`` of a late decode."""

    def meta(self, types: Mapping[str, pa.DataType]) -> Any:
        """An empty dataframe with these columns."""

    def is_images(self, dtype: Any) -> bool:
        """Whether a column of this dtype holds decoded images."""

    def arrays(self, images: Any) -> list:
        """Views of each image of a column, (height, width, channels), None where there is none."""

    def with_columns(
        self, frame: Any, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> Any:
        """``frame`` with new columns, whose values belong to ``rows``; null in the others."""

    def values(self, series: Any) -> Any:
        """A column as an array: (n,), or (n, d) of lists; strings and bytes as NumPy objects.

        None where nulls, or lists of differing lengths, don't allow that.
        """

    def host(self, array: Any) -> np.ndarray:
        """An array in host memory."""

    def partition_memory(self) -> int:
        """Bytes of pixels that a partition should hold at most, judged by the memory here."""


def choose_backend(name: str | None = None) -> BackendName:
    """The backend by argument, else dask's ``dataframe.backend`` if set, else what the machine has.

    Raises
    ------
    ArgumentError
        For a name that is neither ``"cudf"`` nor ``"pandas"``.
    """
    if name is None:
        # dask's own default is "pandas", which can't be told from a user's choice of it.
        name = dask.config.get("dataframe.backend", "pandas")
        if name == "pandas" and not _chosen_pandas() and gpus():
            name = "cudf"
    check_choice("backend", name, ("cudf", "pandas"))
    return name  # type: ignore[return-value]


@functools.cache
def get_backend(name: BackendName) -> Backend:
    """The backend of this name, which imports its library.

    Raises
    ------
    MissingDependencyError
        Where the library is not installed.
    """
    if name == "pandas":
        from dask_image_ingest.frames.pandas import PandasBackend

        return PandasBackend()
    try:
        from dask_image_ingest.frames.cudf import CudfBackend
    except ImportError as error:
        raise MissingDependencyError(
            "backend='cudf' needs cuDF and CuPy, which are not installed: pip install "
            "'dask-image-ingest[cuda12]', or [cuda13]; on a machine with no GPU pass "
            "backend='pandas'"
        ) from error
    return CudfBackend()


def dataframe_accessor(name: str) -> Callable[[type], type]:
    """Class decorator: an accessor on the dataframes of every backend, once it is loaded.

    pandas' own dataframes, which are always there, are for whoever defines the accessor.
    """

    def register(accessor: type) -> type:
        _accessors[name] = accessor
        for attach in _attaching.values():
            attach(name, accessor)
        return accessor

    return register


def attach_accessors(backend: BackendName, attach: Callable[[str, type], None]) -> None:
    """Say how a backend that has just been loaded gives its dataframes an accessor."""
    _attaching[backend] = attach
    for name, accessor in _accessors.items():
        attach(name, accessor)


def backend_of(frame: Any) -> Backend:
    """The backend that a pandas or cuDF object belongs to."""
    library = type(frame).__module__.partition(".")[0]
    return get_backend("cudf" if library == "cudf" else "pandas")


def gpus() -> int:
    """How many GPUs this machine has for a cuDF backend; 0 where cuDF is not installed."""
    import importlib.util

    if importlib.util.find_spec("cudf") is None or importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def require_gpu() -> None:
    """Refuse to make a cuDF frame in a process without a GPU.

    Raises
    ------
    MissingDependencyError
    """
    if not gpus():
        raise MissingDependencyError(
            "backend='cudf' needs a GPU, and CUDA finds none in this process. Compute on the "
            "workers of a cluster that have one, and take the result as pandas, "
            "ddf.to_backend('pandas').compute(); or read with backend='pandas'"
        )


def _chosen_pandas() -> bool:
    return any(
        layer.get("dataframe", {}).get("backend") == "pandas"
        for layer in (*dask.config.collect_yaml(dask.config.paths), dask.config.collect_env())
    )


__all__: Sequence[str] = [
    "Backend",
    "BackendName",
    "NewColumn",
    "attach_accessors",
    "backend_of",
    "choose_backend",
    "dataframe_accessor",
    "get_backend",
    "gpus",
    "require_gpu",
]
