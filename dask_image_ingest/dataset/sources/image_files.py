"""The lazy read of image files: a row for each, told by the listing alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dask_image_ingest import dask_internals as dx
from dask_image_ingest.dataset.late.decode import ImageDecode
from dask_image_ingest.dataset.schema import POINTER_COLUMNS
from dask_image_ingest.dataset.settled import is_settled
from dask_image_ingest.frames import REFERENCE, BackendName, get_backend
from dask_image_ingest.passwords import without_passwords
from dask_image_ingest.storage import Shard, is_web

__all__ = ["ImageFiles", "ReadImageFiles"]


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """The image files of a collection.

    Attributes
    ----------
    files
        As they were listed, in the order of the rows.
    edges
        The row at which each partition begins, and the number of rows.
    root
        The folder below which a file's path is its key.
    classes
        The folders that are classes, in order; None where there is no column of them.
    images
        How they are decoded, if that is asked for.
    has_error
        Whether there is a place for the errors of a decode.
    backend
        The name of the dataframe library.
    token
        Stands for all of it, sizes and times of the files included.
    """

    files: tuple[Shard, ...]
    edges: tuple[int, ...]
    root: str
    classes: tuple[str, ...] | None
    images: ImageDecode
    has_error: bool
    backend: BackendName
    token: str

    def __dask_tokenize__(self) -> str:
        return self.token

    def __str__(self) -> str:
        return without_passwords(f"{len(self.files)} files below {self.root}")

    __repr__ = __str__

    @functools.cached_property
    def types(self) -> dict[str, pa.DataType]:
        """The columns, in order, with their Arrow types."""
        types = {name: t for name, t in POINTER_COLUMNS.items() if name != "error"}
        if self.has_error:
            types["error"] = POINTER_COLUMNS["error"]
        if self.classes is not None:
            types["label"] = pa.int64()
        return types | {"image": REFERENCE}

    def part(self, number: int) -> FileGroup:
        """The files of one partition."""
        start, stop = self.edges[number : number + 2]
        return FileGroup(self.files[start:stop], start, self.root, self.classes, self.backend)


@dataclass(frozen=True)
class FileGroup:
    """The files of one partition: what its task carries."""

    files: tuple[Shard, ...]
    first: int
    root: str
    classes: tuple[str, ...] | None
    backend: BackendName

    def frame(self, columns: Sequence[str], types: dict[str, pa.DataType]) -> Any:
        """A row for each file; null what only its bytes tell. Opens none."""
        count = len(self.files)
        table = pa.table({"": pa.nulls(count)}).select([])
        for name in columns:
            table = table.append_column(name, self._column(name, types[name]))
        return get_backend(self.backend).frame(
            table, np.arange(self.first, self.first + count), None
        )

    def _column(self, name: str, type_: pa.DataType) -> pa.Array:
        if name == "image":
            return self._references()
        if name == "__key__":
            return pa.array([key_of(file.url, self.root) for file in self.files], type_)
        if name == "__url__":
            return pa.array([file.url for file in self.files], type_)
        if name == "offset":
            return pa.array(np.zeros(len(self.files), np.int64))
        if name == "nbytes":
            return pa.array([file.size for file in self.files], type_)
        if name == "label":
            numbers = {folder: number for number, folder in enumerate(self.classes or ())}
            folders = (class_of(file.url, self.root) for file in self.files)
            return pa.array([None if each is None else numbers[each] for each in folders], type_)
        return pa.nulls(len(self.files), type_)

    def _references(self) -> pa.StructArray:
        told = {
            "url": self._column("__url__", pa.string()),
            "shard_size": self._column("nbytes", pa.int64()),
            "version": pa.array([file.version for file in self.files], pa.string()),
            "key": self._column("__key__", pa.string()),
            "offset": self._column("offset", pa.int64()),
            "nbytes": self._column("nbytes", pa.int64()),
        }
        absent = len(self.files)
        fields = [told.get(field.name, pa.nulls(absent, field.type)) for field in REFERENCE]
        return pa.StructArray.from_arrays(fields, fields=list(REFERENCE))


def key_of(url: str, root: str) -> str:
    """The path of a file below the root, without its suffix."""
    below = url.removeprefix(root).lstrip("/")
    if is_web(url):
        below = below.partition("?")[0]
    folder, slash, name = below.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return f"{folder}{slash}{stem if dot and stem else name}"


def class_of(url: str, root: str) -> str | None:
    """The folder right below the root that a file is in; None if it is in none."""
    folder, slash, _ = key_of(url, root).partition("/")
    return folder if slash else None


def _read(group: FileGroup, columns: Sequence[str], types: dict[str, pa.DataType]) -> Any:
    return group.frame(columns, types)


class ReadImageFiles(dx.PartitionsFiltered, dx.BlockwiseIO):
    """Rows of image files, with references in place of images; opens no file."""

    _parameters: ClassVar = ["files", "columns", "_partitions"]
    _defaults: ClassVar = {"columns": None, "_partitions": None}
    _absorb_projections = True

    files: ImageFiles

    @property
    def columns(self) -> list[str]:
        """The columns that are asked for."""
        columns = self.operand("columns")
        return list(self.files.types) if columns is None else list(columns)

    @functools.cached_property
    def _meta(self) -> Any:
        types = {name: self.files.types[name] for name in self.columns}
        return get_backend(self.files.backend).meta(types)

    def _divisions(self) -> tuple[int | None, ...]:
        # Of those that are read: dask's Repartition asks for these, past `divisions`.
        wanted = self.operand("_partitions")
        edges = self.files.edges
        if wanted is None:
            return (*edges[:-1], edges[-1] - 1)
        ascending = all(one < other for one, other in itertools.pairwise(wanted))
        if not wanted or not ascending:
            return (None,) * (len(wanted) + 1)
        return (*(edges[number] for number in wanted), edges[wanted[-1] + 1] - 1)

    @functools.cached_property
    def divisions(self) -> tuple[int | None, ...]:
        """Known, since rows are numbered from the first file to the last."""
        return self._divisions()

    def _filtered_task(self, name: Any, index: int) -> dx.Task:
        types = {name: self.files.types[name] for name in self.columns}
        return dx.Task(
            name, _read, self.files.part(index), self.columns, types, _data_producer=True
        )

    def _simplify_up(self, parent: dx.Expr, dependents: Any) -> dx.Expr | None:
        if is_settled(self, dependents):
            return None
        if isinstance(parent, dx.Len):
            edges = self.files.edges
            return dx.Literal(sum(edges[n + 1] - edges[n] for n in self._partitions))
        return super()._simplify_up(parent, dependents)

    def __str__(self) -> str:
        return f"ReadImageFiles({self.files}, columns={self.columns})"

    def _tree_repr_argument_construction(self, i: int, op: Any, header: str) -> str:
        if self._parameters[i] == "files":
            return f"{header} {op}"
        return super()._tree_repr_argument_construction(i, op, header)
