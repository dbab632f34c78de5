"""Curation of a collection: quality, fingerprints, duplicates, embeddings.

In: a frame with a column of images, or of references to them. Out: the frame with more columns to
filter by. All of it is public, as ``dask_image_ingest.curate``.
"""

from dask_image_ingest.curate.duplicates import find_duplicates, find_overlaps
from dask_image_ingest.curate.embed import (
    classify,
    compute_scores,
    compute_similarity,
    embed,
    embed_texts,
)
from dask_image_ingest.curate.fingerprints import compute_fingerprints
from dask_image_ingest.curate.hash_store import write_hashes
from dask_image_ingest.curate.models import (
    Head,
    nsfw_model,
    open_clip_model,
    transformers_model,
)
from dask_image_ingest.curate.quality import find_issues, measure_quality, summarize_issues
from dask_image_ingest.curate.report import Report, write_report
from dask_image_ingest.curate.semantic import find_clusters, find_semantic_duplicates
from dask_image_ingest.curate.vectors import find_nearest

__all__ = [
    "Head",
    "Report",
    "classify",
    "compute_fingerprints",
    "compute_scores",
    "compute_similarity",
    "embed",
    "embed_texts",
    "find_clusters",
    "find_duplicates",
    "find_issues",
    "find_nearest",
    "find_overlaps",
    "find_semantic_duplicates",
    "measure_quality",
    "nsfw_model",
    "open_clip_model",
    "summarize_issues",
    "transformers_model",
    "write_hashes",
    "write_report",
]


def __dir__() -> list[str]:
    return __all__
