"""Choose the backend of a new collection; find that of a frame."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable
from typing import Any

import dask
import numpy as np

from dask_image_ingest.arguments import check_choice
from dask_image_ingest.dask_internals import (
    DataFrameBackendEntrypoint,
    FrameBase,
    dataframe_creation_dispatch,
)
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.frames.backend import Backend, BackendName, gpus
from dask_image_ingest.frames.reference_dtype import as_references
from dask_image_ingest.typedefs import AnyFrame, AnySeries


def choose_backend(name: str | None = None) -> BackendName:
    """Backend by argument, else by Dask's ``dataframe.backend`` if set, else by the machine.

    Raises
    ------
    ArgumentError
        For a name that is neither ``"cudf"`` nor ``"pandas"``.
    """
    if name is None:
        # Dask's default is "pandas" too: look whether the user has set it.
        name = dask.config.get("dataframe.backend", "pandas")
        if name == "pandas" and not _pandas_is_configured() and gpus():
            name = "cudf"
    check_choice("backend", name, ("cudf", "pandas"))
    return name  # type: ignore[return-value]


@functools.cache
def get_backend(name: BackendName) -> Backend:
    """Backend by name; imports its library."""
    if name == "pandas":
        from dask_image_ingest.frames.pandas_backend import PandasBackend

        return PandasBackend()
    try:
        from dask_image_ingest.frames.cudf.backend import CudfBackend
    except ImportError as error:
        raise MissingDependencyError(
            "backend='cudf' needs cuDF and CuPy, which are not installed: pip install "
            "'dask-image-ingest[cuda12]', or [cuda13]; on a machine with no GPU pass "
            "backend='pandas'"
        ) from error
    return CudfBackend()


def backend_of(frame: AnyFrame | AnySeries) -> Backend:
    """Backend of a pandas, cuDF or Dask object."""
    frame = frame._meta if isinstance(frame, FrameBase) else frame
    library = type(frame).__module__.partition(".")[0]
    return get_backend("cudf" if library == "cudf" else "pandas")


def image_columns(frame: AnyFrame) -> list[Any]:
    """Names of the columns of decoded images."""
    backend = backend_of(frame)
    return [name for name, dtype in frame.dtypes.items() if backend.is_images(dtype)]


def reference_columns(frame: AnyFrame) -> list[Any]:
    """Names of the columns of image references."""
    backend = backend_of(frame)
    return [name for name, dtype in frame.dtypes.items() if backend.is_references(dtype)]


def image_column(frame: AnyFrame) -> str:
    """The name of a frame's image column; of several, the one called ``image``."""
    names = image_columns(frame)
    if names.count("image") == 1:
        return "image"
    if len(names) != 1:
        if names:
            problem, advice = (
                f"has the image columns {', '.join(map(repr, names))}",
                f"choose one, .images[{names[0]!r}]",
            )
        elif references := reference_columns(frame):
            listed = ", ".join(map(repr, references))
            problem, advice = (
                f"has references, not decoded, in {listed}",
                "decode_images decodes them",
            )
        else:
            problem, advice = "has no column of images", "dask_image_ingest.decode_images adds one"
        raise ArgumentError(f"the frame {problem}, and .images is of one: {advice}")
    return names[0]


def without(frame: AnyFrame, columns: Collection[Hashable]) -> AnyFrame:
    """Frame without some columns. ``drop`` would copy and pin all others of a cuDF frame."""
    kept = [name for name in frame.columns if name not in columns]
    return frame if len(kept) == len(frame.columns) else frame[kept]


def converted(frame: AnyFrame, name: BackendName) -> AnyFrame:
    """Rows without pixels as a frame of a backend, in the types of a read.

    An index of other labels than whole numbers becomes the numbers of the rows.
    """
    here = backend_of(frame)
    if here.name == name:
        return frame
    table = here.to_arrow(frame)
    for place, (column, dtype) in enumerate(frame.dtypes.items()):
        if here.is_references(dtype):
            table = table.set_column(place, column, as_references(table.column(place)))
    is_numbered = len(frame) and frame.index.dtype == np.int64
    labels = frame.index.to_numpy() if is_numbered else np.arange(len(frame))
    return get_backend(name).frame(table, labels, None)


class _CudfEntrypoint(DataFrameBackendEntrypoint):
    """dask_cudf's backend, asked for by ``to_backend``: it knows no images by itself."""

    def __getattribute__(self, name: str) -> Any:
        if name == "to_backend":
            get_backend("cudf")  # registers this package's conversions
        from dask_cudf.backends import CudfBackendEntrypoint

        return getattr(CudfBackendEntrypoint, name)


dataframe_creation_dispatch.register_backend("cudf", _CudfEntrypoint())


def _pandas_is_configured() -> bool:
    return any(
        layer.get("dataframe", {}).get("backend") == "pandas"
        for layer in (*dask.config.collect_yaml(dask.config.paths), dask.config.collect_env())
    )
