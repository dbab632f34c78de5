"""``.images`` on pandas, cuDF and dask frames.

In: a frame with a column of images. Out: arrays, batches, thumbnails, new columns. Nothing is
computed here: each method calls the subpackage that does it.
"""

from dask_image_ingest.accessor.frames import register_html  # its import registers the accessors

__all__: list[str] = []

register_html()
