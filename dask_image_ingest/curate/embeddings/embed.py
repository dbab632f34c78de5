"""``embed``, ``scores`` and ``similarity``: what models say of images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import check_choice, check_frame, is_column, shown
from dask_image_ingest.curate.embeddings.vectors import beside, check_vectors, from_vectors
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of


def embed(
    frame: Any, model: Callable[..., Any], column: str = "embedding", batch_size: int = 256
) -> Any:
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
    >>> embedded = curate.embed(ddf, lambda images: images.mean(axis=(1, 2)) / 255, "color")
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


@dataclass(frozen=True)
class Head:
    """A linear model, or several layers, over embeddings.

    ``x`` becomes ``W x + b`` in each layer. A vector of d numbers needs a first layer (m, d), and
    the last one has to give one number.

    Parameters
    ----------
    layers
        Weights (out, in), as torch's ``Linear.weight``, and biases (out,) of each layer.
    hidden
        What follows each layer but the last: nothing, or ``"relu"``, max(x, 0).
    output
        What follows the last one: nothing, or ``"sigmoid"``, 1 / (1 + exp(-x)).

    Raises
    ------
    ArgumentError
        If the layers don't fit each other.

    Examples
    --------
    >>> head = curate.Head([(np.array([[0.5, 0.25, 0.25]]), np.array([0.0]))])
    >>> head(np.array([[1.0, 0.0, 2.0]]))
    array([1.], dtype=float32)
    """

    layers: Sequence[tuple[Any, Any]]
    hidden: Literal["none", "relu"] = "none"
    output: Literal["none", "sigmoid"] = "none"

    def __post_init__(self) -> None:
        check_choice("hidden", self.hidden, ("none", "relu"))
        check_choice("output", self.output, ("none", "sigmoid"))
        layers = [
            (np.asarray(weights, np.float32), np.asarray(bias, np.float32))
            for weights, bias in self.layers
        ]
        shapes = [weights.shape for weights, _ in layers]
        biases = [bias.shape for _, bias in layers]
        fits = layers and all(
            len(shape) == 2 and bias == shape[:1]
            for shape, bias in zip(shapes, biases, strict=True)
        )
        follow = fits and all(one[0] == other[1] for one, other in pairwise(shapes))
        if not follow or shapes[-1][0] != 1:
            raise ArgumentError(
                f"layers= has weights of shapes {shapes} and biases of shapes {biases}: pass (out, "
                "in) and (out,) of each layer, of which the last gives one number"
            )
        object.__setattr__(self, "layers", tuple(layers))

    def __call__(self, vectors: Any) -> Any:
        """The score of each vector: float32 (n,) of (n, d), NumPy or CuPy."""
        wanted = self.layers[0][0].shape[1]
        if vectors.shape[1] != wanted:
            raise ArgumentError(
                f"the head takes vectors of length {wanted}, these are of {vectors.shape[1]}"
            )
        values = vectors.astype(np.float32)
        for number, (weights, bias) in enumerate(self.layers):
            if number and self.hidden == "relu":
                values = np.maximum(values, 0)
            values = values @ beside(weights, values).T + beside(bias, values)
        values = values[:, 0]
        return 0.5 + 0.5 * np.tanh(0.5 * values) if self.output == "sigmoid" else values


def scores(
    frame: Any,
    head: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    column: str = "embedding",
) -> Any:
    """Add columns of scores that are made of embeddings: aesthetics, NSFW, any classifier.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    head
        A :class:`Head`, or a function that takes vectors (n, d) as they are in the column, NumPy or
        CuPy, and gives (n,); or several of these, by name.
    column
        The column of vectors. Heads made for vectors of length one, as those of CLIP are, need
        such: :func:`open_clip_model` and :func:`transformers_model` give them.

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
    for name, function in heads.items():
        title = f"score.{name}" if name else "score"
        frame = from_vectors(frame, (column,), title, function)
    return frame


def similarity(frame: Any, column: str, other: Any) -> Any:
    """Add a column with the cosine of two columns of vectors, as of images and their captions.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    column
        The column of vectors.
    other
        Another one; or one vector (d,), as of a text, with which all are compared.

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
    >>> red = curate.similarity(frame, "embedding", np.array([1.0, 0.0, 0.0]))
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
