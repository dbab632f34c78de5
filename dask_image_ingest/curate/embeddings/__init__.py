"""Embeddings by models, and what their distances give: duplicates, scores, search, clusters.

In: a frame with images, or with a column of vectors. Out: the frame with vectors, scores, classes
or clusters as columns.
"""

from dask_image_ingest.curate.embeddings.clusters import find_clusters
from dask_image_ingest.curate.embeddings.embed import (
    classify,
    compute_scores,
    compute_similarity,
    embed,
    embed_texts,
)
from dask_image_ingest.curate.embeddings.models import (
    Head,
    nsfw_model,
    open_clip_model,
    transformers_model,
)
from dask_image_ingest.curate.embeddings.search import find_nearest
from dask_image_ingest.curate.embeddings.semantic import find_semantic_duplicates

__all__ = [
    "Head",
    "classify",
    "compute_scores",
    "compute_similarity",
    "embed",
    "embed_texts",
    "find_clusters",
    "find_nearest",
    "find_semantic_duplicates",
    "nsfw_model",
    "open_clip_model",
    "transformers_model",
]
