"""``ImageDataFrame``: a Dask dataframe whose accessor ``.images`` type checkers know.

They don't see accessors, which are attached when the package is imported. So public functions are
annotated with this class, which exists for type checkers alone: at run time it is Dask's own, and
nothing of this package is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dask.dataframe as dd

if TYPE_CHECKING:
    from dask_image_ingest.accessor.lazy import LazyImages

    class ImageDataFrame(dd.DataFrame):
        """A Dask dataframe, and its ``.images``."""

        @property
        def images(self) -> LazyImages:
            """The images of the frame."""
            raise NotImplementedError
else:
    ImageDataFrame = dd.DataFrame
