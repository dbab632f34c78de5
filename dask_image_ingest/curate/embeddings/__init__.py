"""Embeddings by models, and what their distances give: duplicates, scores, search, clusters.

In: a frame with images, or with a column of vectors. Out: the frame with vectors, scores, classes
or clusters as columns.
"""

from dask_image_ingest.curate.embeddings.adaptors import (
    nsfw_model,
    open_clip_model,
    transformers_model,
)
from dask_image_ingest.curate.embeddings.clusters import clusters
from dask_image_ingest.curate.embeddings.embed import embed, scores, similarity
from dask_image_ingest.curate.embeddings.head import Head
from dask_image_ingest.curate.embeddings.search import nearest
from dask_image_ingest.curate.embeddings.semantic import semantic_duplicates
from dask_image_ingest.curate.embeddings.texts import classify, embed_texts

__all__ = [
    "Head",
    "classify",
    "clusters",
    "embed",
    "embed_texts",
    "nearest",
    "nsfw_model",
    "open_clip_model",
    "scores",
    "semantic_duplicates",
    "similarity",
    "transformers_model",
]
