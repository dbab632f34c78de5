"""Duplicate detection by hashes, within a collection or between two.

In: a frame with fingerprints, or with images to compute them from. Out: the frame with a group, a
distance and whether to keep the row.
"""

from dask_image_ingest.curate.duplicates.duplicates import duplicates, overlaps

__all__ = ["duplicates", "overlaps"]
