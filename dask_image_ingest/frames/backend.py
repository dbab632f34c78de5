"""The protocol of a backend, accessors for all backends, and the GPUs of this process."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from dask_image_ingest.decode import PixelBuffer, Pixels
from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.typedefs import Array, ArrayModule, DataFrame, Dtype, Series

BackendName = Literal["cudf", "pandas"]

#: Values and type of a new column. The values are an array (n,), for a list type an array (n, d),
#: for a tensor type (n, ...), a Python list of strings or bytes, or an Arrow array, in chunks if it
#: is too large for one.
NewColumn: TypeAlias = tuple[Any, pa.DataType]


class Backend(Protocol):
    """Protocol of a dataframe library, implemented in ``pandas_backend.py`` and ``cudf/``."""

    @property
    def name(self) -> BackendName:
        """Name for ``backend=``."""

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Device that decodes images."""

    @property
    def largest_partition(self) -> int:
        """Largest image column of a partition, in bytes of pixels."""

    @property
    def numpy(self) -> ArrayModule:
        """Array module of the backend: NumPy or CuPy."""

    def holds(self, type_: pa.DataType) -> bool:
        """True if a metadata column can have this type."""

    def thread_setup(self) -> Callable[[], None]:
        """Function to call first in another thread, which selects this thread's device there."""

    def pixel_buffer(self, nbytes: int) -> PixelBuffer:
        """Buffer for about ``nbytes`` of pixels."""

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> DataFrame:
        """Dataframe of the columns of ``table``, followed by ``image`` if there are pixels."""

    def to_arrow(self, frame: DataFrame) -> pa.Table:
        """Metadata columns of a dataframe, on the host."""

    def to_storage(self, frame: DataFrame) -> pa.Table:
        """All columns of a dataframe and its index, on the host and in types for parquet."""

    def from_storage(self, table: pa.Table, meta: DataFrame) -> DataFrame:
        """Restore a dataframe, or some of its columns: those of ``meta``, an empty dataframe."""

    def with_images(
        self, frame: DataFrame, pixels: Pixels, image: str, error: str | None
    ) -> DataFrame:
        """Assign the columns of a late decode: replace them, or append them if missing.

        ``image`` and ``error`` are their names; no error column if ``error`` is None.
        """

    def with_references(
        self,
        frame: DataFrame,
        references: pa.Array | pa.ChunkedArray,
        image: str,
        error: str | None,
    ) -> DataFrame:
        """Replace images by references, and errors by nulls; columns as in `with_images`.

        ``references`` have the type ``REFERENCE``.
        """

    def is_references(self, dtype: Dtype) -> bool:
        """True for the dtype of image references."""

    def meta(self, types: Mapping[str, pa.DataType]) -> DataFrame:
        """Empty dataframe with these columns."""

    def is_images(self, dtype: Dtype) -> bool:
        """True for the dtype of decoded images."""

    def arrays(self, images: Series) -> list[Any]:
        """Views of the images of a column, (height, width, channels); None for a missing image."""

    def with_columns(
        self, frame: DataFrame, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> DataFrame:
        """Assign columns whose values belong to ``rows``; other rows, and NaN, are null."""

    def values(self, series: Series) -> Array | None:
        """Column as an array: (n,), or (n, ...) for lists and tensors; else NumPy objects.

        None if nulls or differing list lengths make that impossible.
        """

    def has_rows(self, dtype: Dtype) -> bool:
        """True for the dtypes of lists, structs and Python objects, for `rows`."""

    def rows(self, series: Series) -> list[Any]:
        """Each row of such a column: arrays, lists, dicts, as `row_values`; None for null."""

    def normalized(self, images: Sequence[Array], scale: np.ndarray, shift: np.ndarray) -> Array:
        """Stack images of one shape to float32 (n, channels, height, width): value * scale + shift.

        ``scale`` and ``shift`` are float32 of shape (channels,) or (1,).
        """

    def count_levels(self, images: Sequence[Array]) -> np.ndarray:
        """Number of pixels by channel and value: int64 (channels, 256).

        All images have the same number of channels.
        """

    def host(self, array: Array) -> np.ndarray:
        """Array in host memory."""

    def partition_memory(self) -> int:
        """Most bytes of pixels that a partition should hold, given the workers' memory."""


Kind = Literal["dataframe", "series"]
Accessor = TypeVar("Accessor", bound=type)

# Attaches an accessor of a kind and name to a backend's classes.
Attach: TypeAlias = Callable[[Kind, str, type], None]

# All accessors, and the function of each loaded backend, in whichever order they register.
_accessors: dict[tuple[Kind, str], type] = {}
_attach_functions: dict[BackendName, Attach] = {}


def register_accessor(kind: Kind, name: str) -> Callable[[Accessor], Accessor]:
    """Class decorator: attach an accessor to this kind of object in every other backend.

    pandas is not included: the caller registers the accessor there.
    """

    def register(accessor: Accessor) -> Accessor:
        _accessors[kind, name] = accessor
        for attach in _attach_functions.values():
            attach(kind, name, accessor)
        return accessor

    return register


def attach_accessors(backend: BackendName, attach: Attach) -> None:
    """Attach all accessors, now and later, to a backend that has just been loaded."""
    _attach_functions[backend] = attach
    for (kind, name), accessor in _accessors.items():
        attach(kind, name, accessor)


def gpus() -> int:
    """Number of GPUs that the cuDF backend can use in this process; 0 without cuDF."""
    if importlib.util.find_spec("cudf") is None or importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def require_gpu() -> None:
    """Raise if this process has no GPU for a cuDF frame."""
    if not gpus():
        raise MissingDependencyError(
            "backend='cudf' needs a GPU, and CUDA finds none in this process. Compute on the "
            "workers of a cluster that have one, and take the result as pandas, "
            "ddf.to_backend('pandas').compute(); or read with backend='pandas'"
        )
