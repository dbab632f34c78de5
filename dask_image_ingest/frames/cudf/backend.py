"""The cuDF backend; implements the protocol ``Backend``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import cudf
import cupy
import numpy as np
import pyarrow as pa
import rmm

from dask_image_ingest.client import workers
from dask_image_ingest.dask_internals import has_worker
from dask_image_ingest.decode import Pixels
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames.arrow_types import bytes_of, row_values
from dask_image_ingest.frames.backend import (
    Kind,
    NewColumn,
    attach_accessors,
    gpus,
    require_gpu,
)
from dask_image_ingest.frames.cudf.columns import (
    empty_frame,
    frame_from_storage,
    frame_of_new,
    image_arrays,
    is_bytes_dtype,
    is_images,
    is_references,
    make_frame,
    make_index,
    supports,
    table_for_storage,
    table_of,
    typed,
    with_columns_of,
)
from dask_image_ingest.frames.cudf.convert import register
from dask_image_ingest.frames.cudf.pixels import LARGEST_PARTITION, DevicePixels, count_levels
from dask_image_ingest.frames.image_dtype import IMAGE
from dask_image_ingest.frames.nested_dtype import list_values
from dask_image_ingest.frames.pandas_backend import stack_views
from dask_image_ingest.typedefs import Dtype

# Share of a GPU's memory for a partition, as in dask_cudf's readers.
_PARTITION_SHARE = 1 / 32

# Assumed memory of a GPU that can't be queried, as in dask_cudf.
_ASSUMED_GPU_MEMORY = 8 * 2**30

# Share of a GPU's memory that the pool keeps when it is unused: some partitions. DALI and a model
# allocate theirs elsewhere.
_KEPT_SHARE = 1 / 4

# Variables by which CuPy and cuDF take a default stream for each thread.
_PER_THREAD_STREAMS = ("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "CUDF_PER_THREAD_STREAM")

_scale_and_shift = cupy.ElementwiseKernel(
    "uint8 value, float32 scale, float32 shift",
    "float32 result",
    "result = value * scale + shift",
    "scale_and_shift",
)


def refuse_per_thread_streams() -> None:
    """Raise if libraries use a default stream for each thread.

    Frames go from thread to thread (of a loader, of Dask, of a warm-up), in the order of the one
    default stream. Streams of threads have no order among them.

    Raises
    ------
    ArgumentError
        If CuPy or cuDF has been told so by its variable.
    """
    on = [name for name in _PER_THREAD_STREAMS if os.environ.get(name, "0") not in ("", "0")]
    if on:
        raise ArgumentError(
            f"{' and '.join(on)}: with a default stream for each thread, a thread would use pixels "
            "that another one has yet to write. Unset it in the environment of this process and of "
            "the workers, or pass backend='pandas'"
        )


class CudfBackend:
    """Backend whose partitions are cuDF dataframes, with pixels in GPU memory."""

    name: Literal["cudf"] = "cudf"
    device: Literal["gpu"] = "gpu"
    largest_partition = LARGEST_PARTITION
    numpy = cupy

    def __init__(self) -> None:
        refuse_per_thread_streams()

    def holds(self, type_: pa.DataType) -> bool:
        return supports(type_)

    def thread_setup(self) -> Callable[[], None]:
        """Function that selects this thread's GPU: a new thread starts on the first one."""
        runtime = cupy.cuda.runtime
        device = runtime.getDevice() if gpus() else None
        return lambda: None if device is None else runtime.setDevice(device)

    def pixel_buffer(self, nbytes: int) -> DevicePixels:
        require_gpu()
        return DevicePixels(nbytes)

    def frame(self, table: pa.Table, index: np.ndarray, pixels: Pixels | None) -> cudf.DataFrame:
        return make_frame(table, make_index(index), pixels)

    def to_arrow(self, frame: cudf.DataFrame) -> pa.Table:
        return table_of(frame)

    def to_storage(self, frame: cudf.DataFrame) -> pa.Table:
        return table_for_storage(frame)

    def from_storage(self, table: pa.Table, meta: cudf.DataFrame) -> cudf.DataFrame:
        return frame_from_storage(table, meta)

    def with_images(
        self, frame: cudf.DataFrame, pixels: Pixels, image: str, error: str | None
    ) -> cudf.DataFrame:
        error_types = {} if error is None else {error: pa.string()}
        if not len(frame):
            return with_columns_of(frame, empty_frame({**error_types, image: IMAGE}, frame.index))
        errors = [reason or None for reason in pixels.errors]
        table = pa.table({name: pa.array(errors, type_) for name, type_ in error_types.items()})
        new = make_frame(table, frame.index, pixels)
        new.columns = [*error_types, image]
        return with_columns_of(frame, new)

    def with_references(
        self,
        frame: cudf.DataFrame,
        references: pa.Array | pa.ChunkedArray,
        image: str,
        error: str | None,
    ) -> cudf.DataFrame:
        errors = {} if error is None else {error: pa.nulls(len(references), pa.string())}
        new = make_frame(pa.table({**errors, image: references}), frame.index, None)
        return with_columns_of(frame, new)

    def is_references(self, dtype: Dtype) -> bool:
        return is_references(dtype)

    def meta(self, types: Mapping[str, pa.DataType]) -> cudf.DataFrame:
        """Empty dataframe with these columns; needs no GPU."""
        return empty_frame(types)

    def is_images(self, dtype: Dtype) -> bool:
        return is_images(dtype)

    def arrays(self, images: cudf.Series) -> list[cupy.ndarray | None]:
        return image_arrays(images)

    def with_columns(
        self, frame: cudf.DataFrame, columns: Mapping[str, NewColumn], rows: Sequence[int]
    ) -> cudf.DataFrame:
        return with_columns_of(frame, frame_of_new(columns, rows, frame.index))

    def values(self, series: cudf.Series) -> Any:
        """Column as an array; None if nulls or differing list lengths make that impossible."""
        if not len(series):
            return _no_values(series.dtype)
        if is_bytes_dtype(series.dtype):
            return np.array(bytes_of(series.to_arrow()).to_pylist(), object)
        if isinstance(series.dtype, cudf.ListDtype):
            return None if series.null_count else _list_values(series)
        if series.dtype.kind == "f":
            return series.to_cupy(na_value=np.nan)
        if series.dtype.kind in "iub":
            return None if series.null_count else series.to_cupy()
        return np.array(series.to_arrow().to_pylist(), object)

    def has_rows(self, dtype: Dtype) -> bool:
        return isinstance(dtype, (cudf.ListDtype, cudf.StructDtype)) and not is_bytes_dtype(dtype)

    def rows(self, series: cudf.Series) -> list[Any]:
        column = typed(series.to_arrow(), series.dtype)
        return [_on_device(row) for row in row_values(column)]

    def normalized(
        self, images: Sequence[cupy.ndarray], scale: np.ndarray, shift: np.ndarray
    ) -> cupy.ndarray:
        batch = stack_views(images, self).transpose(0, 3, 1, 2)
        result = cupy.empty(batch.shape, cupy.float32)
        scale, shift = (cupy.asarray(factors)[:, None, None] for factors in (scale, shift))
        _scale_and_shift(batch, scale, shift, result)
        return result

    def count_levels(self, images: Sequence[cupy.ndarray]) -> np.ndarray:
        return count_levels(images, self)

    def host(self, array: cupy.ndarray) -> np.ndarray:
        return array.get()

    def partition_memory(self) -> int:
        """1/32 of the smallest GPU's memory."""
        return int(_gpu_memory() * _PARTITION_SHARE)


def _on_device(row: object) -> Any:
    is_numeric = isinstance(row, np.ndarray) and row.dtype.kind in "biuf"
    return cupy.asarray(row) if is_numeric else row


def _no_values(dtype: Dtype) -> Any:
    """Values of a column without rows: if it has no memory, cuDF raises."""
    if isinstance(dtype, cudf.ListDtype) and not is_bytes_dtype(dtype):
        is_number = getattr(dtype.element_type, "kind", "") in ("i", "u", "f", "b")
        return cupy.empty((0, 0), dtype.element_type) if is_number else np.empty((0, 0), object)
    is_number = isinstance(dtype, np.dtype) and dtype.kind in "iufb"
    return cupy.empty(0, dtype) if is_number else np.empty(0, object)


def _list_values(series: cudf.Series) -> Any:
    """Lists as (n, length); None if their lengths differ."""
    are_numbers = getattr(series.dtype.element_type, "kind", "") in ("i", "u", "f", "b")
    if not are_numbers or series.list.leaves.null_count:
        # Lists of lists, of text, or with nulls: through the host, as in the pandas backend.
        values = list_values(pa.chunked_array([typed(series.to_arrow(), series.dtype)]))
        return cupy.asarray(values) if are_numbers and values is not None else values
    lengths = series.list.len()
    if lengths.nunique() > 1:
        return None
    length = int(lengths.iloc[0])
    return series.list.leaves.to_cupy().reshape(len(series), length)


def _gpu_memory() -> int:
    """Memory of the workers' smallest GPU, else of this machine's GPU, queried without CUDA."""
    from distributed.diagnostics import nvml

    sizes = [worker["gpu"]["memory-total"] for worker in workers() or () if "gpu" in worker]
    if not sizes:
        try:
            sizes = [nvml.one_time()["memory-total"]]
        except RuntimeError:
            sizes = []
    return min((size for size in sizes if size), default=_ASSUMED_GPU_MEMORY)


def use_pool() -> None:
    """Have the current GPU's memory come from a pool of CUDA's, unless one was chosen before.

    RMM's default is ``cudaMalloc`` and ``cudaFree``, and the latter waits for all work of the GPU,
    also for that of other streams. CuPy allocates by RMM, since cuDF's import. Nothing changes in a
    worker, which has what its cluster was given, and on a GPU without such pools.
    """
    if has_worker() or not gpus():
        return
    with suppress(RuntimeError):
        if type(rmm.mr.get_current_device_resource()) is rmm.mr.CudaMemoryResource:
            _, total = cupy.cuda.runtime.memGetInfo()
            pool = rmm.mr.CudaAsyncMemoryResource(release_threshold=int(total * _KEPT_SHARE))
            rmm.mr.set_current_device_resource(pool)


def _attach(kind: Kind, name: str, accessor: type) -> None:
    # cuDF warns if an accessor replaces an attribute, even by itself.
    owner = cudf.DataFrame if kind == "dataframe" else cudf.Series
    if getattr(owner, name, None) is not accessor:
        extensions = cudf.api.extensions
        if kind == "dataframe":
            extensions.register_dataframe_accessor(name)(accessor)
        else:
            extensions.register_series_accessor(name)(accessor)


use_pool()
register()
attach_accessors("cudf", _attach)
