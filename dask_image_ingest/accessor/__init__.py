"""``.images`` on pandas, cuDF and dask frames.

In: a frame with a column of images. Out: its pixels, and what other rooms make of them. Nothing is
computed here; each method hands on to the room that does it.
"""

import dask_image_ingest.accessor.eager
import dask_image_ingest.accessor.lazy  # noqa: F401  they register the accessors
from dask_image_ingest.accessor.notebook import register_html

__all__: list[str] = []

register_html()
