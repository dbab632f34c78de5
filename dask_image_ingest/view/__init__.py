"""For the eye: thumbnails and pages.

In: a few rows of a frame. Out: HTML that needs no other file.
"""

from dask_image_ingest.view.gallery import gallery
from dask_image_ingest.view.thumbnails import Thumbnails, make_thumbnails

__all__ = [
    "Thumbnails",
    "gallery",
    "make_thumbnails",
]
