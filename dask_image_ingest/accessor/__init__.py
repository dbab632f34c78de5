"""``.images`` on pandas, cuDF and dask frames.

In: a frame with a column of images. Out: arrays, batches, thumbnails, new columns. Nothing is
computed here: each method calls the subpackage that does it.
"""

import dask_image_ingest.accessor.eager
import dask_image_ingest.accessor.lazy  # noqa: F401  both register accessors
from dask_image_ingest.accessor.eager import register_html

__all__: list[str] = []

register_html()
