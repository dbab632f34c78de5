"""Choice of a backend, for a collection and of a frame."""

from __future__ import annotations

import functools
from typing import Any

import dask

from dask_image_ingest.arguments import check_choice
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import MissingDependencyError
from dask_image_ingest.frames.backend import Backend, BackendName, gpus


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


def backend_of(frame: Any) -> Backend:
    """The backend that a pandas, cuDF or Dask object belongs to."""
    frame = frame._meta if isinstance(frame, FrameBase) else frame
    library = type(frame).__module__.partition(".")[0]
    return get_backend("cudf" if library == "cudf" else "pandas")


def image_columns(frame: Any) -> list[Any]:
    """The columns of a frame that hold decoded images."""
    backend = backend_of(frame)
    return [name for name, dtype in frame.dtypes.items() if backend.is_images(dtype)]


def reference_columns(frame: Any) -> list[Any]:
    """The columns of a frame that hold references to images."""
    backend = backend_of(frame)
    return [name for name, dtype in frame.dtypes.items() if backend.is_references(dtype)]


def _chosen_pandas() -> bool:
    return any(
        layer.get("dataframe", {}).get("backend") == "pandas"
        for layer in (*dask.config.collect_yaml(dask.config.paths), dask.config.collect_env())
    )
