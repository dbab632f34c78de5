"""Thumbnails and HTML pages of images.

In: a frame, of which only the rows shown are decoded. Out: HTML that needs no other file.
"""

from dask_image_ingest.view.gallery import gallery, refuse_source, title_of_shards
from dask_image_ingest.view.page import (
    Thumbnails,
    columns_chart,
    marking_widget,
    page,
    write_page,
)
from dask_image_ingest.view.thumbnails import first_rows, make_thumbnails, references_of_images

__all__ = [
    "Thumbnails",
    "columns_chart",
    "first_rows",
    "gallery",
    "make_thumbnails",
    "marking_widget",
    "page",
    "references_of_images",
    "refuse_source",
    "title_of_shards",
    "write_page",
]
