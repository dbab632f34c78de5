"""``embed``, ``scores`` and ``similarity``: numbers that models make of images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dask_image_ingest.arguments import check_frame, is_column, shown
from dask_image_ingest.curate.embeddings.vectors import beside, check_vectors, from_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


def embed(
    frame: Frame,
    model: Callable[..., Any],
    *,
    column: str = "embedding",
    batch_size: int = 256,
) -> Frame:
    """Add a column of embeddings that a model makes of the images.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of images.
    model
        Called with each batch: uint8 (n, height, width, channels), NumPy or CuPy, or a list of
        arrays where shapes differ. It gives (n, d), an array or a tensor. A class, or a
        ``functools.partial`` of one, is called once in each worker process, and what it makes is
        called with the batches: so are :func:`open_clip_model` and :func:`transformers_model`.
    column
        The name of the new column.
    batch_size
        Images in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with the column, ``list<float32>``, in place of one of this name; null where there
        is no image. The images stay.
        Lazy if ``frame`` is: together with signals and fingerprints each image is decoded once, and
        filters on other columns run before any image is decoded.

    Raises
    ------
    ArgumentError
        If the frame has no images; when computed, if the model gives something else than (n, d).
    FunctionError
        When computed, if the model fails.
    MissingDependencyError
        When computed, if a library of the model is not installed where it runs.

    Examples
    --------
    >>> embedded = curate.embed(
    ...     ddf, lambda images: images.mean(axis=(1, 2)) / 255, column="color"
    ... )
    >>> embedded[["__key__", "color"]].head(1)
      __key__                color
    0    0000  [0.555..., 0.414...
    """
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    check_frame(meta)
    if is_column(column, meta.columns) and not backend_of(meta).is_images(meta.dtypes[column]):
        frame = frame.drop(columns=column)
    return frame.images.map_batches(
        model, {column: "list<float32>"}, batch_size=batch_size, keep_image=True
    )


def scores(
    frame: Frame,
    head: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *,
    column: str = "embedding",
    batch_size: int = 64,
) -> Frame:
    """Add columns of scores of embeddings or images: aesthetics, NSFW, any classifier.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors, or of images.
    head
        A :class:`Head`, or a function that takes vectors (n, d) as they are in the column, NumPy or
        CuPy, and gives (n,); or several of these, by name. For images a function or a class as for
        :func:`embed` that gives (n,), such as :func:`nsfw_model`.
    column
        The column of vectors or images. Heads made for vectors of length one, as those of CLIP are,
        need such: :func:`open_clip_model` and :func:`transformers_model` give them.
    batch_size
        Images in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with a column ``score``, or ``score.<name>`` of each of several, float32, in place
        of those it has; null where there is no vector. Lazy if ``frame`` is.

    Raises
    ------
    ArgumentError
        If a column is missing; when computed, if the function gives something else
        than a number for each vector.

    Examples
    --------
    >>> warm = curate.Head([(np.array([[1.0, 0.0, -1.0]]), np.array([0.0]))])
    >>> scored = curate.scores(frame, {"warm": warm})
    >>> scored[["__key__", "score.warm"]].head(1).round(2)
      __key__  score.warm
    0    0000        0.18
    """
    check_vectors(frame, column)
    heads = head if isinstance(head, Mapping) else {"": head}
    for name, function in heads.items():
        if not (isinstance(name, str) and callable(function)):
            raise ArgumentError(
                f"head={shown(head)}: pass a function or a Head, or several by their names"
            )
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    of_images = backend_of(meta).is_images(meta.dtypes[column])
    for name, function in heads.items():
        title = f"score.{name}" if name else "score"
        if of_images:
            frame = frame.drop(columns=title) if title in frame.columns else frame
            frame = frame.images[column].map_batches(
                function, {title: "float32"}, batch_size=batch_size, keep_image=True
            )
            continue
        frame = from_vectors(frame, (column,), title, function)
    return frame


def similarity(frame: Frame, other: Any, *, column: str = "embedding") -> Frame:
    """Add a column with the cosine of two columns of vectors, as of images and their captions.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    other
        Another column of vectors; or one vector (d,), as of a text, with which all are compared.
    column
        The column of vectors.

    Returns
    -------
    dataframe
        ``frame`` with a column ``similarity``, float32, in place of the one it has: x·y / (‖x‖
        ‖y‖), -1 to 1; null where one of the vectors is, NaN where one is zero. Lazy if ``frame``
        is.

    Raises
    ------
    ArgumentError
        If a column is missing; when computed, if the vectors differ in length.

    Examples
    --------
    >>> red = curate.similarity(frame, np.array([1.0, 0.0, 0.0]))
    >>> red[["__key__", "similarity"]].head(1).round(2)
      __key__  similarity
    0    0000         0.7
    """
    if isinstance(other, str):
        return from_vectors(frame, (column, other), "similarity", _cosines)
    vector = np.asarray(other)
    if vector.ndim != 1 or vector.dtype.kind not in "iuf":
        raise ArgumentError(f"other={shown(other)}: pass the name of a column, or a vector (d,)")
    function = functools.partial(_cosines, others=vector.astype(np.float64))
    return from_vectors(frame, (column,), "similarity", function)


def _cosines(vectors: Any, others: Any) -> Any:
    if vectors.shape[-1] != others.shape[-1]:
        raise ArgumentError(
            f"vectors of length {vectors.shape[-1]} and {others.shape[-1]} have no cosine: take "
            "both from one model"
        )
    others = beside(others, vectors)
    # In float64: the same for a row in whatever partition, once rounded.
    vectors, others = vectors.astype(np.float64), others.astype(np.float64)
    products = (vectors * others).sum(axis=-1)
    lengths = np.sqrt((vectors**2).sum(axis=-1) * (others**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return products / lengths
