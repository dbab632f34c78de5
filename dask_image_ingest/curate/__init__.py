"""Curation of a collection: quality, fingerprints, duplicates, embeddings.

In: a frame with a column of images, or of references to them. Out: the frame with more columns to
filter by. All of it is public, as ``dask_image_ingest.curate``.
"""

from dask_image_ingest.curate.duplicates import duplicates, overlaps
from dask_image_ingest.curate.embeddings import (
    Head,
    classify,
    clusters,
    embed,
    embed_texts,
    nearest,
    nsfw_model,
    open_clip_model,
    scores,
    semantic_duplicates,
    similarity,
    transformers_model,
)
from dask_image_ingest.curate.pixels import fingerprints, issue_summary, issues, quality
from dask_image_ingest.curate.report import Report, report

__all__ = [
    "Head",
    "Report",
    "classify",
    "clusters",
    "duplicates",
    "embed",
    "embed_texts",
    "fingerprints",
    "issue_summary",
    "issues",
    "nearest",
    "nsfw_model",
    "open_clip_model",
    "overlaps",
    "quality",
    "report",
    "scores",
    "semantic_duplicates",
    "similarity",
    "transformers_model",
]
