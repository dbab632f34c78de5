"""Duplicate detection by hashes, within a collection or between two.

In: a frame with fingerprints, or with images to compute them from. Out: the frame with a group, a
distance and whether to keep the row.
"""

from dask_image_ingest.curate.duplicates.find_duplicates import find_duplicates, find_overlaps

__all__ = ["find_duplicates", "find_overlaps"]
