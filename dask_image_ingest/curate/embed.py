"""Columns computed by models: of images, of texts, and of both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_image_ingest.arguments import check_frame, list_of_names, shown
from dask_image_ingest.curate.models import Head
from dask_image_ingest.curate.pixels import map_images
from dask_image_ingest.curate.vectors import (
    as_numbers,
    check_vectors,
    has_direction,
    map_vectors,
    on_host,
    to_device_of,
    unit,
)
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import Frame
from dask_image_ingest.dataset.references import LOCATION_COLUMNS
from dask_image_ingest.dataset.schema import HEADERS
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import backend_of, image_columns
from dask_image_ingest.ops import (
    BatchMap,
    InputColumn,
    apply_batch_map,
    call_once,
    make_batch_map,
    unwrapped,
)
from dask_image_ingest.typedefs import AnyFrame, Array, DataFrame

# Columns of a read that embeddings don't replace.
_OF_READS = ("__key__", *LOCATION_COLUMNS, *HEADERS, "error")

# What a model returns, for errors.
_VECTORS = "an array (n, d) of numbers, a vector for each"
_NUMBERS = "an array (n,), a number for each"


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
        The name of the new column, which is none of the images', and none that a read has for every
        image, such as ``__key__`` or ``height``.
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
        If the frame has no images, or ``column`` is reserved; when computed, if the model's result
        is not (n, d).
    FunctionError
        When computed, if the model fails.
    MissingDependencyError
        When computed, if a library of the model is not installed where it runs.

    Examples
    --------
    >>> embedded = curate.embed(
    ...     ddf, lambda images: images.mean(axis=(1, 2)) / 255, column="color"
    ... )
    >>> embedded[["__key__", "color"]].head(1).reset_index(drop=True)
      __key__                color
    0    0000  [0.555..., 0.414...
    """
    _check_output(frame, column)
    outputs = {column: "list<float32>"}
    return map_images(frame, model, outputs, batch_size, called_by="embed", returns=_VECTORS)


def _check_output(frame: AnyFrame, column: object) -> None:
    """Refuse a name for the new column of vectors that is of a column which must stay."""
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    check_frame(meta)
    if not isinstance(column, str):
        raise ArgumentError(f"column={shown(column)}: pass the name of the new column")
    reserved = {*image_columns(meta), *(name for name in _OF_READS if name in meta.columns)}
    if column in reserved:
        raise ArgumentError(
            f"column={column!r} would replace the column of this name, of the images or of their "
            "read: choose another name"
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
        A :class:`Head`, or a function that takes vectors (n, d) of the column, NumPy or CuPy, and
        returns (n,); or a mapping of names to several of these. It gets copies, and may be a class
        as for :func:`embed`. For images, a function or a class as for :func:`embed` that returns
        (n,), such as :func:`nsfw_model`.
    column
        The column of vectors or images. Heads trained on vectors of length one, such as those for
        CLIP, need the same here: :func:`open_clip_model` and :func:`transformers_model` return such
        vectors.
    batch_size
        Images or vectors in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with a column ``score``, or ``score.<name>`` for each name, float32, added or
        replaced; null where there is no vector or image, and where the function gives None or NaN.
        Lazy if ``frame`` is.

    Raises
    ------
    ArgumentError
        If a column is missing; when computed, if the function does not return a number for each
        vector, or a head takes vectors of another length.
    FunctionError
        When computed, if the function fails.
    MissingDependencyError
        When computed, if a library of a model is not installed where it runs.

    Examples
    --------
    >>> warm = curate.Head([(np.array([[1.0, 0.0, -1.0]]), np.array([0.0]))])
    >>> scored = curate.compute_scores(frame, {"warm": warm})
    >>> scored[["__key__", "score.warm"]].head(1).round(2).reset_index(drop=True)
      __key__  score.warm
    0    0000        0.18
    """
    check_vectors(frame, column)
    heads = head if isinstance(head, Mapping) else {"": head}
    are_functions = all(isinstance(name, str) and callable(heads[name]) for name in heads)
    if not heads or not are_functions:
        raise ArgumentError(
            f"head={shown(head)}: pass a function or a Head, or several by their names"
        )
    meta = frame._meta if isinstance(frame, FrameBase) else frame
    of_images = backend_of(meta).is_images(meta.dtypes[column])
    options: dict[str, Any] = {"called_by": "compute_scores", "returns": _NUMBERS}
    for name, function in heads.items():
        title = f"score.{name}" if name else "score"
        outputs = {title: "float32"}
        if title == column:
            raise ArgumentError(f"the column {title!r} would be made of itself: rename it first")
        if of_images:
            frame = map_images(frame, function, outputs, batch_size, column, **options)
            continue
        length = function.length if isinstance(function, Head) else None
        frame = map_vectors(
            frame, [column], outputs, function, length=length, batch_size=batch_size, **options
        )
    return frame


def compute_similarity(
    frame: Frame, other: str | np.ndarray | Sequence[float], *, column: str = "embedding"
) -> Frame:
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
    >>> red[["__key__", "similarity"]].head(1).round(2).reset_index(drop=True)
      __key__  similarity
    0    0000         0.7
    """
    options: dict[str, Any] = {"called_by": "compute_similarity", "writes": False}
    if isinstance(other, str):
        return map_vectors(frame, [column, other], {"similarity": "float32"}, _cosines, **options)
    vector = np.asarray(other)
    if vector.ndim != 1 or vector.dtype.kind not in "iuf":
        raise ArgumentError(f"other={shown(other)}: pass the name of a column, or a vector (d,)")
    function = functools.partial(_cosines, others=vector.astype(np.float64))
    return map_vectors(
        frame, [column], {"similarity": "float32"}, function, length=len(vector), **options
    )


def _cosines(vectors: Array, others: Array) -> Array:
    others = to_device_of(others, vectors)
    # In float64, so that the rounded result of a row does not depend on its partition.
    vectors, others = vectors.astype(np.float64), others.astype(np.float64)
    products = (vectors * others).sum(axis=-1)
    lengths = np.sqrt((vectors**2).sum(axis=-1) * (others**2).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return products / lengths


def embed_texts(
    frame: Frame,
    model: Callable[..., Any],
    texts: str = "txt",
    *,
    column: str = "text_embedding",
    batch_size: int = 256,
) -> Frame:
    """Add a column with a model's embeddings of texts, such as captions.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of strings.
    model
        As for :func:`embed`, with a method ``texts`` that takes a list of strings and returns
        (n, d), as the models of :func:`open_clip_model` and :func:`transformers_model`. A worker
        process that also embeds images with it loads it once.
    texts
        The column of strings.
    column
        The name of the new column, as for :func:`embed`.
    batch_size
        Texts in a batch, at most.

    Returns
    -------
    dataframe
        ``frame`` with the column, ``list<float32>``, added or replaced; null texts get the
        embedding of the empty text. Lazy if ``frame`` is; decodes no image.

    Raises
    ------
    ArgumentError
        If the column is missing, ``column`` is reserved, or the model has no method ``texts``; when
        computed, if the model's result is not (n, d).
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
    >>> matched = curate.compute_similarity(both, "text_embedding")
    >>> matched[["__key__", "similarity"]].head(1).round(1).reset_index(drop=True)
      __key__  similarity
    0    0000         0.8
    """
    _check_output(frame, column)
    if texts not in frame.columns or texts == column:
        raise ArgumentError(f"texts={shown(texts)}: pass another column of the frame than column=")
    _check_text_model(model)
    embedded = make_batch_map(
        model,
        {column: "list<float32>"},
        batch_size,
        [texts],
        True,
        list(frame.columns),
        called_by="embed_texts",
        noun="texts",
        returns=_VECTORS,
        method="texts",
    )
    return apply_batch_map(frame, TextMap(**vars(embedded)))


@dataclass(frozen=True)
class TextMap(BatchMap):
    """``map_batches`` of a column of texts, in which null is the empty text."""

    def arguments(self, frame: DataFrame) -> tuple[list[int], list[InputColumn]]:
        """All rows, and their texts."""
        rows, columns = super().arguments(frame)
        texts = [
            ["" if value is None else str(value) for value in column.values] for column in columns
        ]
        return rows, [*map(InputColumn, texts)]


def _check_text_model(model: object) -> None:
    """Check that a model, or the class of one, embeds texts."""
    if not callable(getattr(unwrapped(model), "texts", None)):
        raise ArgumentError(
            f"model={shown(model)} has no method texts: pass one that embeds texts, too, such as "
            "open_clip_model() gives"
        )


def classify(
    frame: Frame,
    model: Callable[..., Any] | np.ndarray,
    names: Sequence[str],
    *,
    column: str = "embedding",
    prompt: str = "a photograph of {}",
    scale: float = 100.0,
) -> Frame:
    """Zero-shot classification, as with CLIP: add the class whose name is nearest to each image.

    The names are embedded at once, in this process.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with a column of vectors.
    model
        The model that made the vectors, as for :func:`embed_texts`; or vectors of the names,
        (k, d).
    names
        The classes.
    column
        The column of vectors.
    prompt
        The text to embed for a class: ``{}`` stands for its name. By default ``"a photograph of
        cat"`` is embedded for the class ``"cat"``; ``"{}"`` embeds names as they are.
    scale
        Factor of the cosines before the softmax: 100 for CLIP.

    Returns
    -------
    dataframe
        ``frame`` with a column ``class``, the name of the largest score, and ``score.<name>`` for
        each class, float32: softmax of ``scale`` × cosine over all names, 0 to 1. They are added or
        replaced, and null where there is no vector, or one that is zero or not finite. Lazy if
        ``frame`` is.

    Raises
    ------
    ArgumentError
        If the column is missing, ``names`` has fewer than two or a repeated one, or the model has
        no method ``texts``; when computed, if the vectors differ in length.
    FunctionError
        If the model fails.

    Examples
    --------
    >>> classes = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])   # or a model that embeds texts
    >>> named = curate.classify(frame, classes, ["red", "blue"])
    >>> named["class"].value_counts().to_dict()
    {'red': 42, 'blue': 9}
    """
    check_vectors(frame, column)
    chosen = list_of_names("names", names, "names of classes")
    if len(chosen) < 2 or len(set(chosen)) < len(chosen):
        raise ArgumentError(f"names={shown(names)}: pass at least two, each once")
    if not isinstance(prompt, str) or "{}" not in prompt:
        raise ArgumentError(f"prompt={shown(prompt)}: pass a text with {{}} for the name")
    if not isinstance(scale, (int, float, np.number)) or not 0 < scale < np.inf:
        raise ArgumentError(f"scale={shown(scale)}: pass a number above 0, 100 for CLIP")
    vectors = _class_vectors(model, [prompt.replace("{}", name) for name in chosen])
    function = functools.partial(
        _classified, classes=vectors, scale=float(scale), names=tuple(chosen)
    )
    outputs = dict.fromkeys((f"score.{name}" for name in chosen), "float32") | {"class": "string"}
    return map_vectors(
        frame, [column], outputs, function,
        length=vectors.shape[1], directed=True, called_by="classify", writes=False,
    )  # fmt: skip


def _class_vectors(model: Callable[..., Any] | Array, texts: list[str]) -> np.ndarray:
    """Vectors of texts of length one: float64 (k, d)."""
    vectors = model
    if callable(model):
        _check_text_model(model)
        vectors = call_once(model, "classify", "texts", texts, "the texts of names=")
    try:
        vectors = as_numbers(vectors).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"model= gives no vectors of the names: {error}") from error
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ArgumentError(
            f"model= gives an array of shape {vectors.shape} for {len(texts)} names: it has to be "
            "a vector for each"
        )
    if not has_direction(vectors).all():
        raise ArgumentError("model= gives a vector that is zero or not finite, which has no cosine")
    return unit(vectors)


def _classified(
    vectors: Array, classes: np.ndarray, scale: float, names: tuple[str, ...]
) -> dict[str, Any]:
    """The softmax of the cosines with the classes, and the name of the nearest one."""
    vectors = vectors.astype(np.float64)
    lengths = (vectors**2).sum(axis=1, keepdims=True) ** 0.5
    values = scale * (vectors @ to_device_of(classes, vectors).T) / lengths
    values = np.exp(values - values.max(axis=1, keepdims=True))
    values /= values.sum(axis=1, keepdims=True)
    best = on_host(values.argmax(axis=1)).tolist()
    scores = {f"score.{name}": values[:, number] for number, name in enumerate(names)}
    return {**scores, "class": [names[number] for number in best]}
