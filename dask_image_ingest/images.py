"""The ``.images`` accessor: the pixels of a frame's image column."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import Backend, backend_of


@pd.api.extensions.register_dataframe_accessor("images")
class FrameImages:
    """Pixels of a pandas or cuDF dataframe."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def arrays(self) -> list:
        """Views of each decoded image.

        Returns
        -------
        list of array, shape (height, width, channels), uint8
            NumPy or CuPy views into the column's one buffer, without a copy; None for a row without
            an image.

        Raises
        ------
        ArgumentError
            If the frame has no image column, or more than one.

        Examples
        --------
        >>> first = frame.images.arrays()[0]  # doctest: +SKIP
        """
        backend = backend_of(self._frame)
        return backend.arrays(self._frame[image_column(self._frame, backend)])


def image_column(frame: Any, backend: Backend) -> str:
    """The name of a frame's image column, told by its type."""
    names = [name for name, dtype in frame.dtypes.items() if backend.is_images(dtype)]
    if len(names) != 1:
        found = f"has {', '.join(map(repr, names))}" if names else "has no column of images"
        raise ArgumentError(f"the frame {found}; .images needs exactly one: select it first")
    return names[0]
