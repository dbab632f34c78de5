"""Numbers and hashes made of pixels alone: quality, fingerprints."""

from dask_image_ingest.curate.pixels.fingerprints import fingerprints
from dask_image_ingest.curate.pixels.quality import issue_summary, issues, quality

__all__ = ["fingerprints", "issue_summary", "issues", "quality"]
