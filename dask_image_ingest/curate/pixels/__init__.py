"""Quality signals and fingerprints, which need pixels but no model.

In: a frame with images; hashes of bytes and signals of shape decode none. Out: the frame with
numbers, flags and hashes as columns.
"""

from dask_image_ingest.curate.pixels.fingerprints import compute_fingerprints
from dask_image_ingest.curate.pixels.quality import find_issues, measure_quality, summarize_issues

__all__ = ["compute_fingerprints", "find_issues", "measure_quality", "summarize_issues"]
