"""A collection made better: quality, fingerprints, duplicates, embeddings.

In: a frame with a column of images, or one whose rows point to them. Out: the frame with columns to
filter by. All of it is public, as ``dask_image_ingest.curate``.
"""

from dask_image_ingest.curate.adaptors import open_clip_model, transformers_model
from dask_image_ingest.curate.clusters import clusters
from dask_image_ingest.curate.duplicates import duplicates, overlaps
from dask_image_ingest.curate.embed import Head, embed, scores, similarity
from dask_image_ingest.curate.fingerprints import fingerprints
from dask_image_ingest.curate.quality import issue_summary, issues, quality
from dask_image_ingest.curate.report import Report, report
from dask_image_ingest.curate.search import nearest
from dask_image_ingest.curate.semantic import semantic_duplicates

__all__ = [
    "Head",
    "Report",
    "clusters",
    "duplicates",
    "embed",
    "fingerprints",
    "issue_summary",
    "issues",
    "nearest",
    "open_clip_model",
    "overlaps",
    "quality",
    "report",
    "scores",
    "semantic_duplicates",
    "similarity",
    "transformers_model",
]
