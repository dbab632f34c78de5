"""Vectors that models make of images, and what is told by their distances."""

from dask_image_ingest.curate.embeddings.adaptors import open_clip_model, transformers_model
from dask_image_ingest.curate.embeddings.clusters import clusters
from dask_image_ingest.curate.embeddings.embed import Head, embed, scores, similarity
from dask_image_ingest.curate.embeddings.search import nearest
from dask_image_ingest.curate.embeddings.semantic import semantic_duplicates

__all__ = [
    "Head",
    "clusters",
    "embed",
    "nearest",
    "open_clip_model",
    "scores",
    "semantic_duplicates",
    "similarity",
    "transformers_model",
]
