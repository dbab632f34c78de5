"""``Head``: a small model over embeddings, and its weights in files."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import check_choice, shown
from dask_image_ingest.curate.embeddings.vectors import to_device_of
from dask_image_ingest.errors import ArgumentError, MissingDependencyError


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

    def __call__(self, vectors: Any) -> Any:
        """Score vectors (n, d), NumPy or CuPy: float32 (n,)."""
        length = self.layers[0][0].shape[1]
        if vectors.shape[1] != length:
            raise ArgumentError(
                f"the head takes vectors of length {length}, these are of {vectors.shape[1]}"
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
    except (OSError, ValueError, zipfile.BadZipFile, RuntimeError, AttributeError) as error:
        raise ArgumentError(f"path={shown(path)} cannot be read: {error}") from error
    except Exception as error:  # errors of safetensors and pickle have no common base class
        if type(error).__module__.partition(".")[0] not in ("safetensors", "_pickle", "pickle"):
            raise
        raise ArgumentError(f"path={shown(path)} cannot be read: {error}") from error
