"""Quality signals and fingerprints, which need pixels but no model.

In: a frame with images; hashes of bytes and signals of shape decode none. Out: the frame with
numbers, flags and hashes as columns.
"""

from dask_image_ingest.curate.pixels.fingerprints import fingerprints
from dask_image_ingest.curate.pixels.quality import issue_summary, issues, quality

__all__ = ["fingerprints", "issue_summary", "issues", "quality"]
