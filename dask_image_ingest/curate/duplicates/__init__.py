"""Images that are there more than once, found by their hashes, and which of them stay."""

from dask_image_ingest.curate.duplicates.duplicates import duplicates, overlaps

__all__ = ["duplicates", "overlaps"]
