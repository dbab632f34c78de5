"""``embed``, ``compute_scores`` and ``compute_similarity``: columns computed by models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dask_image_ingest.arguments import check_frame, shown
from dask_image_ingest.curate.embeddings.vectors import check_vectors, from_vectors, to_device_of
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
    """Add a column with a model's embeddings of the images.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of images.
    model
        Called with each batch: uint8 (n, height, width, channels), NumPy or CuPy, or a list of
        arrays if shapes differ. It returns (n, d), an array or a tensor. A class, or a
        ``functools.partial`` of one, is instantiated once in each worker process, and the instance
        is called with the batches; :func:`open_clip_model` and :func:`transformers_model` are such.
    column
        The name of the new column.
    batch_size
        Images in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with the column, ``list<float32>``, added or replaced; null where there is no
        image. The images are kept. Lazy if ``frame`` is: signals and fingerprints in the same query
        share one decode of each image, and filters on other columns run before it.

    Raises
    ------
    ArgumentError
        If the frame has no images; when computed, if the model's result is not (n, d).
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
    check_frame(frame._meta if isinstance(frame, FrameBase) else frame)
    return frame.images.map_batches(
        model, {column: "list<float32>"}, batch_size=batch_size, keep_image=True
    )


def compute_scores(
    frame: Frame,
    head: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    *,
    column: str = "embedding",
    batch_size: int = 64,
) -> Frame:
    """Add scores of embeddings or images: aesthetics, NSFW, any classifier.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors, or of images.
    head
        A :class:`Head`, or a function that takes the column's vectors (n, d), NumPy or CuPy, and
        returns (n,); or a mapping of names to several of these. For images, a function or a class
        as for :func:`embed` that returns (n,), such as :func:`nsfw_model`.
    column
        The column of vectors or images. Heads trained on vectors of length one, such as those for
        CLIP, need the same here: :func:`open_clip_model` and :func:`transformers_model` return such
        vectors.
    batch_size
        Images in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with a column ``score``, or ``score.<name>`` for each name, float32, added or
        replaced; null where there is no vector. Lazy if ``frame`` is.

    Raises
    ------
    ArgumentError
        If a column is missing; when computed, if the function does not return a number for each
        vector.

    Examples
    --------
    >>> warm = curate.Head([(np.array([[1.0, 0.0, -1.0]]), np.array([0.0]))])
    >>> scored = curate.compute_scores(frame, {"warm": warm})
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
            frame = frame.images[column].map_batches(
                function, {title: "float32"}, batch_size=batch_size, keep_image=True
            )
            continue
        frame = from_vectors(frame, (column,), title, function)
    return frame


def compute_similarity(frame: Frame, other: Any, *, column: str = "embedding") -> Frame:
    """Add the cosine of two columns of vectors, such as of images and their captions.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    other
        Another column of vectors; or one vector (d,), such as of a text, to compare all with.
    column
        The column of vectors.

    Returns
    -------
    dataframe
        ``frame`` with a column ``similarity``, float32, added or replaced: x·y / (‖x‖ ‖y‖), -1 to
        1; null where one of the vectors is null or zero. Lazy if ``frame`` is.

    Raises
    ------
    ArgumentError
        If a column is missing; when computed, if the vectors differ in length.

    Examples
    --------
    >>> red = curate.compute_similarity(frame, np.array([1.0, 0.0, 0.0]))
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
    others = to_device_of(others, vectors)
    # In float64, so that the rounded result of a row does not depend on its partition.
    vectors, others = vectors.astype(np.float64), others.astype(np.float64)
    products = (vectors * others).sum(axis=-1)
    lengths = np.sqrt((vectors**2).sum(axis=-1) * (others**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return products / lengths
