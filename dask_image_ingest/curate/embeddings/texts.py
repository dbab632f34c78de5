"""``embed_texts`` and ``classify``: what a model of images and texts says of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dask_image_ingest.arguments import check_frame, is_column, list_of_names, shown
from dask_image_ingest.curate.embeddings.embed import scores
from dask_image_ingest.curate.embeddings.vectors import (
    beside,
    check_vectors,
    from_vectors,
    on_host,
)
from dask_image_ingest.dask_internals import FrameBase, new_collection
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.ops import MapBatches, built, make_batch_map


def embed_texts(
    frame: Frame,
    model: Callable[..., Any],
    texts: str = "txt",
    *,
    column: str = "text_embedding",
    batch_size: int = 256,
) -> Frame:
    """Add a column of embeddings that a model makes of texts, as of captions.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of strings.
    model
        As for :func:`embed`, with a method ``texts`` that gives (n, d) of a list of strings, as the
        models of :func:`open_clip_model` and :func:`transformers_model` have it. A worker process
        that embeds images by it too has it once.
    texts
        The column of strings.
    column
        The name of the new column.
    batch_size
        Texts in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with the column, ``list<float32>``, in place of one of this name; of a null that
        of the empty text. Lazy if ``frame`` is, and no image is decoded for it.

    Raises
    ------
    ArgumentError
        If the column is missing; when computed, if the model gives something else than (n, d).
    FunctionError
        When computed, if the model fails.

    Examples
    --------
    >>> class Lengths:
    ...     def texts(self, texts):
    ...         return np.array([[len(text), 1.0] for text in texts])
    ...     def __call__(self, images):
    ...         return np.stack([image.mean(axis=(0, 1))[:2] for image in images])
    >>> both = curate.embed_texts(curate.embed(ddf, Lengths), Lengths)
    >>> matched = curate.similarity(both, "text_embedding")
    >>> matched[["__key__", "similarity"]].head(1).round(1)
      __key__  similarity
    0    0000         0.8
    """
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    if not is_column(texts, frame.columns):
        raise ArgumentError(f"texts={shown(texts)}: the frame has no such column")
    if is_column(column, frame.columns):
        frame = frame.drop(columns=column)
    function = functools.partial(_texts_of, model=model)
    outputs = {column: "list<float32>"}
    batches = make_batch_map(function, outputs, batch_size, [texts], True, list(frame.columns))
    if isinstance(frame, FrameBase):
        return new_collection(MapBatches(frame.expr, batches))
    return batches(frame)


def _texts_of(texts: list[Any], model: Callable[..., Any]) -> Any:
    return _with_texts(model).texts(["" if text is None else str(text) for text in texts])


def _with_texts(model: Callable[..., Any]) -> Any:
    made = built(model)
    if not callable(getattr(made, "texts", None)):
        raise ArgumentError(
            f"model={shown(model)} has no method texts: pass one that embeds texts, too, such as "
            "open_clip_model() gives"
        )
    return made


def classify(
    frame: Frame,
    model: Any,
    names: Sequence[str],
    *,
    column: str = "embedding",
    prompt: str = "a photograph of {}",
    scale: float = 100.0,
) -> Frame:
    """Add the class whose name is nearest to each image, of a model of images and texts.

    Zero-shot classification as with CLIP: nothing is trained. The names are embedded at once, in
    this process.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    model
        What made the vectors, as for :func:`embed_texts`; or vectors of the names, (k, d).
    names
        The classes.
    column
        The column of vectors.
    prompt
        The text of which a name is a part.
    scale
        What cosines are multiplied by before the softmax: 100 for CLIP.

    Returns
    -------
    dataframe
        ``frame`` with a column ``class``, the name of the largest score, and ``score.<name>`` of
        each, float32: softmax of ``scale`` × cosine over all names, 0 to 1. They replace those it
        has, and are null where there is no vector. Lazy if ``frame`` is.

    Raises
    ------
    ArgumentError
        If the column is missing, ``names`` has fewer than two or one twice, or the model has no
        method ``texts``; when computed, if the vectors differ in length.

    Examples
    --------
    >>> classes = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])   # or a model that embeds texts
    >>> named = curate.classify(frame, classes, ["red", "blue"])
    >>> named["class"].value_counts().to_dict()
    {'red': 42, 'blue': 9}
    """
    check_vectors(frame, column)
    chosen = list_of_names("names", names, "names of classes")
    if len(chosen) < 2:
        raise ArgumentError(f"names={shown(names)}: pass at least two")
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ArgumentError(f"prompt={shown(prompt)}: pass a text with {{}} for the name")
    vectors = model
    if callable(model):
        vectors = _with_texts(model).texts([prompt.format(name) for name in chosen])
    vectors = on_host(vectors).astype(np.float64)
    if vectors.ndim != 2 or len(vectors) != len(chosen):
        raise ArgumentError(
            f"model= gives an array of shape {vectors.shape} for {len(chosen)} names: it has to be "
            "a vector for each"
        )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    share = functools.partial(_softmax, classes=vectors, scale=float(scale))
    heads = {name: functools.partial(_share_of, share, place) for place, name in enumerate(chosen)}
    frame = scores(frame, heads, column=column)
    name_of = functools.partial(_nearest_name, share, tuple(chosen))
    return from_vectors(frame, (column,), "class", name_of, pa.string())


def _softmax(vectors: Any, classes: np.ndarray, scale: float) -> Any:
    if vectors.shape[1] != classes.shape[1]:
        raise ArgumentError(
            f"vectors of length {vectors.shape[1]} and {classes.shape[1]} have no cosine: take "
            "both from one model"
        )
    vectors = vectors.astype(np.float64)
    lengths = (vectors**2).sum(axis=1, keepdims=True) ** 0.5
    values = scale * (vectors @ beside(classes, vectors).T) / lengths
    values = np.exp(values - values.max(axis=1, keepdims=True))
    return values / values.sum(axis=1, keepdims=True)


def _share_of(share: Callable[..., Any], place: int, vectors: Any) -> Any:
    return share(vectors)[:, place]


def _nearest_name(share: Callable[..., Any], names: tuple[str, ...], vectors: Any) -> list[str]:
    return [names[place] for place in on_host(share(vectors).argmax(axis=1)).tolist()]
