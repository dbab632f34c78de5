"""Pandas dtypes and arrays of lists, structs and arrays of one shape; the base of all of ours.

pandas names an Arrow list ``list<item: float>[pyarrow]``, and can't parse that name. So
``read_parquet`` and Dask's P2P shuffle would fail on a column of embeddings. The dtypes here have
names that pandas can parse. To Arrow and to parquet, arrays of one shape are nested lists of fixed
size, which more readers know than Arrow's type of tensors.
"""

from __future__ import annotations

import builtins
import math
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask.dataframe.extensions import make_array_nonempty
from numpy.typing import DTypeLike

from dask_image_ingest.errors import ArgumentError, OperandError
from dask_image_ingest.frames.arrow_types import (
    as_lists,
    is_any_list,
    is_text,
    named_type,
    tensor_type,
    type_name,
)
from dask_image_ingest.typedefs import Dtype

_ArrowArray: TypeAlias = pa.Array | pa.ChunkedArray


class NestedArray(pd.arrays.ArrowExtensionArray):
    """Extension array of nested values over Arrow memory.

    Rows can be compared for equality, but not ordered, and there is no arithmetic.
    """

    #: Name of the values in errors, and a hint that follows an unsupported operation.
    _noun: str
    _hint: str

    @classmethod
    @abstractmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Dtype | None) -> _ArrowArray:
        """Convert a user's values to the Arrow type of this column."""

    @abstractmethod
    def _objects(self) -> Iterator[Any]:
        """Each row as a Python object; None for a null."""

    def _bytes(self) -> Iterator[bytes | None]:
        """Bytes that are equal if and only if rows are; None for a null."""
        return (None if value is None else repr(value).encode() for value in self._objects())

    def _explode(self) -> Any:
        return self.copy(), np.ones(len(self), np.uint64)

    # Conversion and access.

    @classmethod
    def _from_sequence(
        cls, scalars: Any, *, dtype: Dtype | None = None, copy: bool = False
    ) -> NestedArray:
        if isinstance(scalars, cls) and (dtype is None or dtype == scalars.dtype):
            return scalars.copy() if copy else scalars
        if isinstance(dtype, pd.ArrowDtype) and not _is_nested(dtype):
            # pandas calls this for the counts of a groupby.
            return pd.array(scalars, dtype=dtype)
        return cls(cls._to_arrow(scalars, dtype))

    def _from_pyarrow_array(self, array: _ArrowArray) -> Any:
        # Results of pandas' own methods, which may have another type.
        kind = type(self) if array.type == self._pa_type else pd.arrays.ArrowExtensionArray
        return kind(array)

    def __getitem__(self, item: Any) -> Any:
        if not isinstance(item, (int, np.integer)):
            return super().__getitem__(item)
        row = operator.index(item)
        if not -len(self) <= row < len(self):
            raise IndexError(f"index {row} is out of bounds for a column of {len(self)} rows")
        (value,) = self._from_pyarrow_array(self._pa_array.slice(row % len(self), 1))
        return value

    def __iter__(self) -> Iterator[Any]:
        na_value = self.dtype.na_value
        return (na_value if value is None else value for value in self._objects())

    def __setitem__(self, key: Any, value: object) -> None:
        key = pd.api.indexers.check_array_indexer(self, key)
        rows = np.atleast_1d(np.arange(len(self))[key])
        is_one = isinstance(key, (int, np.integer)) or self._is_one(value)
        values = self._from_sequence([value] if is_one else value, dtype=self.dtype)
        if not is_one and len(values) != len(rows):
            raise ValueError("Length of indexer and values mismatch")
        # Take each row from the old column, or from the new values behind it.
        positions = np.arange(len(self))
        positions[rows] = len(self) + np.arange(len(rows)) % max(1, len(values))
        both = pa.chunked_array([*self._pa_array.chunks, *values._pa_array.chunks], self._pa_type)
        super().__setitem__(slice(None), self._from_pyarrow_array(both.take(positions)))

    def fillna(self, value: Any, limit: int | None = None, copy: bool = True) -> NestedArray:
        """Replace nulls by ``value``, or by the row's value of an array."""
        is_null = self.isna()
        if limit is not None:
            is_null &= is_null.cumsum() <= limit
        filled = self.copy()
        if is_null.any():
            filled[is_null] = value if self._is_one(value) else value[is_null]
        return filled

    def _is_one(self, value: object) -> bool:
        """True for the value of one row, False for a sequence of values."""
        return isinstance(value, dict) or not pd.api.types.is_list_like(value)

    def to_numpy(
        self,
        dtype: DTypeLike | None = None,
        copy: bool = False,
        na_value: object = pd.api.extensions.no_default,
    ) -> np.ndarray:
        """Object array with one object per row."""
        if na_value is pd.api.extensions.no_default:
            na_value = self.dtype.na_value
        if dtype is not None and np.dtype(dtype) != object:
            self._refuse(f"are no {np.dtype(dtype)}")
        objects = np.empty(len(self), object)
        # Row by row: from a list, NumPy would build an array of more dimensions.
        for row, value in enumerate(self._objects()):
            objects[row] = na_value if value is None else value
        return objects

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return self.to_numpy(dtype)

    def astype(self, dtype: DTypeLike | Dtype, copy: bool = True) -> Any:
        """Convert to text, objects, categories or another nested dtype."""
        dtype = pd.api.types.pandas_dtype(dtype)
        if isinstance(dtype, pd.StringDtype) or _is_arrow_text(dtype):
            texts = [None if value is None else str(value) for value in self._objects()]
            return pd.array(texts, dtype=dtype)
        supported = isinstance(dtype, (type(self.dtype), pd.CategoricalDtype)) or _is_nested(dtype)
        if not supported and dtype != np.dtype(object):
            self._refuse(f"are no {dtype}")
        return super().astype(dtype, copy=copy)

    def _values_for_json(self) -> np.ndarray:
        return self.to_numpy()

    # Equality.

    def _digests(self) -> pa.Array:
        return pa.array(self._bytes(), pa.binary())

    def factorize(self, use_na_sentinel: bool = True) -> tuple[np.ndarray, Any]:
        """Codes of the rows, -1 for null, and the distinct values by code."""
        encoded = self._digests().dictionary_encode("mask" if use_na_sentinel else "encode")
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.intp)
        distinct, first_rows = np.unique(codes, return_index=True)
        return codes, self.take(first_rows[distinct >= 0])

    def _values_for_factorize(self) -> tuple[np.ndarray, Any]:
        return np.array(self._digests().to_pylist(), object), None

    def unique(self) -> NestedArray:
        """Distinct values, in the order of their first appearance."""
        return self.factorize(use_na_sentinel=False)[1]

    def value_counts(self, dropna: bool = True) -> pd.Series:
        """Number of rows with each distinct value."""
        codes, values = self.factorize(use_na_sentinel=dropna)
        counts = np.bincount(codes[codes >= 0], minlength=len(values))
        index = pd.Index(values)
        return pd.Series(counts, index=index, name="count", dtype="int64[pyarrow]")

    def isin(self, values: Iterable[Any]) -> np.ndarray:
        """True for each row that is one of ``values``."""
        wanted = set(self._bytes_of(values))
        return np.array([row in wanted for row in self._bytes()], bool)

    def __contains__(self, key: object) -> bool:
        return bool(self.isin([key]).any())

    def _hash_pandas_object(self, *, encoding: str, hash_key: str, categorize: bool) -> np.ndarray:
        hashes = (blake2b(row or b"", digest_size=8).digest() for row in self._bytes())
        return np.frombuffer(b"".join(hashes), np.uint64).copy()

    def _cmp_method(self, other: Any, op: Callable[[Any, Any], Any]) -> Any:
        if op not in (operator.eq, operator.ne):
            self._no_order()
        theirs = self._bytes_of([other] * len(self) if self._is_one(other) else other)
        results = [
            None if left is None or right is None else op(left, right)
            for left, right in zip(self._bytes(), theirs, strict=True)
        ]
        return pd.arrays.ArrowExtensionArray(pa.array(results, pa.bool_()))

    def _bytes_of(self, values: Iterable[Any]) -> list[bytes | None]:
        """`_bytes` of other values; ``b""``, which no row has, for values of another type."""
        if isinstance(values, NestedArray):
            return list(values._bytes())
        # By id: a scalar operand is the same object in every row.
        by_id: dict[int, bytes | None] = {}
        for value in values:
            if id(value) not in by_id:
                try:
                    by_id[id(value)] = next(self._from_sequence([value], dtype=self.dtype)._bytes())
                except OperandError:
                    by_id[id(value)] = b""
        return [by_id[id(value)] for value in values]

    # Unsupported operations.

    def _refuse(self, reason: str) -> NoReturn:
        raise OperandError(f"{self._noun} {reason}: {self._hint}")

    def argsort(self, **options: object) -> np.ndarray:
        """Arbitrary but fixed order, for a groupby; any options mean a user's sort: refused."""
        if options:
            self._no_order()
        keys = [row or b"" for row in self._bytes()]
        return np.array(sorted(range(len(self)), key=keys.__getitem__), np.intp)

    def _no_order(self, *args: object, **kwargs: object) -> NoReturn:
        # Not a TypeError, after which pandas would try to sort objects.
        raise ArgumentError(f"{self._noun} have no order: sort by another column")

    sort = searchsorted = argmin = argmax = _rank = _quantile = _no_order

    def _no_numbers(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("are no numbers")

    _arith_method = _logical_method = _accumulate = _no_numbers
    __invert__ = __neg__ = __pos__ = __abs__ = __array_ufunc__ = _no_numbers
    round = interpolate = _no_numbers

    def _reduce(self, name: str, **kwargs: object) -> NoReturn:
        self._refuse(f"have no {name}")

    def _mode(self, dropna: bool = True) -> NestedArray:
        counts = self.value_counts(dropna)
        return counts.index[(counts == counts.max()).to_numpy(bool)].array

    def _groupby_op(self, *, how: str, ngroups: int, ids: np.ndarray, **kwargs: object) -> Any:
        if how not in ("first", "last"):
            self._refuse(f"have no {how}")
        rows = np.full(ngroups, -1, np.intp)
        candidates = np.flatnonzero(~self.isna() & (ids >= 0))
        # Of several rows of a group, the last assignment wins.
        candidates = candidates[::-1] if how == "first" else candidates
        rows[ids[candidates]] = candidates
        return self.take(rows, allow_fill=True)

    @property
    def _pa_type(self) -> pa.DataType:
        return self._pa_array.type


def _is_arrow_text(dtype: object) -> bool:
    return isinstance(dtype, pd.ArrowDtype) and is_text(dtype.pyarrow_dtype)


def _is_nested(dtype: object) -> bool:
    type_ = dtype.pyarrow_dtype if isinstance(dtype, pd.ArrowDtype) else None
    return type_ is not None and (
        pa.types.is_nested(type_) or isinstance(type_, pa.BaseExtensionType)
    )


def arrow_of(
    values: object, type_: pa.DataType, convert: Callable[[_ArrowArray], _ArrowArray] | None = None
) -> _ArrowArray | None:
    """The Arrow array behind a pandas or Arrow column, cast to this type; None for other values.

    ``convert`` replaces Arrow's own cast.
    """
    values = getattr(values, "array", values)
    if isinstance(values, pd.arrays.ArrowExtensionArray):
        values = values.__arrow_array__()
    if not isinstance(values, (pa.Array, pa.ChunkedArray)):
        return None
    try:
        return values.cast(type_) if convert is None else convert(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        raise OperandError(f"a column of {values.type} can't be one of {type_}") from None


class NamedDtype(pd.ArrowDtype):
    """Base of dtypes with a name that pandas can parse."""

    array_class: ClassVar[builtins.type[NestedArray]]

    @property
    def name(self) -> str:
        """Name that pandas can parse."""
        return type_name(self.pyarrow_dtype)

    @classmethod
    def construct_from_string(cls, string: str) -> NamedDtype:
        """Dtype by its name."""
        # pandas tries every dtype for every name; only a TypeError makes it try the next.
        type_ = cls._type_of(string) if isinstance(string, str) else None
        if type_ is None:
            raise TypeError(f"Cannot construct a {cls.__name__} from {string!r}")
        return cls(type_)

    @classmethod
    @abstractmethod
    def _type_of(cls, name: str) -> pa.DataType | None:
        """Arrow type of a name; None if it is that of another dtype."""

    def construct_array_type(self) -> builtins.type[NestedArray]:
        """Array class of this dtype."""
        return self.array_class

    def holds(self, type_: pa.DataType) -> bool:
        """True for columns of the same Arrow type, and for columns of nulls."""
        return type_ == self.pyarrow_dtype or bool(pa.types.is_null(type_))

    def _get_common_dtype(self, dtypes: list[Any]) -> NamedDtype | None:
        are_held = (isinstance(d, pd.ArrowDtype) and self.holds(d.pyarrow_dtype) for d in dtypes)
        return self if all(are_held) else None

    def __from_arrow__(self, array: _ArrowArray) -> Any:
        return self.array_class(array)

    def __reduce__(self) -> tuple[Any, tuple[pa.DataType]]:
        return type(self), (self.pyarrow_dtype,)


def _parsed(name: str) -> pa.DataType | None:
    try:
        return named_type(name)
    except (ValueError, RecursionError):
        return None


@pd.api.extensions.register_extension_dtype
class NestedDtype(NamedDtype):
    """Dtype of Arrow lists or structs, such as ``list<float32>`` or ``struct<x: list<string>>``."""

    @classmethod
    def _type_of(cls, name: str) -> pa.DataType | None:
        is_nested = name.startswith(("list<", "large_list<", "struct<"))
        return _parsed(name) if is_nested else None

    def __from_arrow__(self, array: _ArrowArray) -> NestedColumn:
        return NestedColumn(array.cast(self.pyarrow_dtype))


class NestedColumn(NestedArray):
    """Extension array of lists or structs."""

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = NestedDtype(values.type)
        self._noun, self._hint = _noun_and_hint(values.type)

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Dtype | None) -> pa.Array | pa.ChunkedArray:
        type_ = dtype.pyarrow_dtype if isinstance(dtype, NestedDtype) else None
        array = None if type_ is None else arrow_of(values, type_)
        if array is not None:
            return array
        try:
            return pa.chunked_array([pa.array(values, type_, from_pandas=True)])
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
            noun = "lists" if type_ is None else _noun_and_hint(type_)[0]
            raise OperandError(f"a column of {noun} takes {noun}: {error}") from None

    def _objects(self) -> Iterator[Any]:
        return iter(self._pa_array.to_pylist())

    def _explode(self) -> Any:
        lists = self._pa_array
        if pa.types.is_struct(lists.type):
            return super()._explode()
        if pa.types.is_large_list(lists.type):  # pandas does not explode these
            lists = lists.cast(pa.list_(lists.type.value_type))
        items, counts = pd.arrays.ArrowExtensionArray(lists)._explode()
        is_nested = pa.types.is_nested(lists.type.value_type)
        return NestedColumn(items.__arrow_array__()) if is_nested else items, counts


def _noun_and_hint(type_: pa.DataType) -> tuple[str, str]:
    if pa.types.is_struct(type_):
        return "structs", "for one of their fields call .struct.field(name)"
    return "lists", "for their numbers call .images.vectors(column)"


def nested_dtype(type_: pa.DataType) -> pd.ArrowDtype:
    """Dtype for a nested Arrow type: `NestedDtype` if `named_type` knows it, else pandas' own."""
    named = _parsed(type_name(type_))
    return pd.ArrowDtype(type_) if named is None else NestedDtype(named)


def list_values(array: pa.ChunkedArray) -> np.ndarray | None:
    """Lists of numbers as (n, length), if possible a view; None for nulls and unequal lengths."""
    chunk = one_chunk(array)
    lengths = np.diff(chunk.offsets.to_numpy())
    if chunk.null_count or (lengths != lengths[:1]).any():
        return None
    length = lengths[0] if len(lengths) else 0
    return chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), length)


def one_chunk(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array; one chunk is not copied."""
    if isinstance(array, pa.Array):
        return array
    chunk = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(chunk, pa.ChunkedArray):
        chunk = pa.concat_arrays(chunk.chunks) if chunk.num_chunks else pa.array([], array.type)
    return chunk


@pd.api.extensions.register_extension_dtype
class TensorDtype(NamedDtype):
    """Dtype of arrays of one shape, ``float16[4, 64, 64]``."""

    pyarrow_dtype: pa.FixedShapeTensorType

    # Class of a row.
    type = np.ndarray

    @classmethod
    def _type_of(cls, name: str) -> pa.DataType | None:
        parsed = _parsed(name) if name.endswith("]") else None
        return None if parsed is None else tensor_type(parsed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each row."""
        return tuple(self.pyarrow_dtype.shape)

    @property
    def value_dtype(self) -> np.dtype:
        """NumPy dtype of the values."""
        return np.dtype(self.pyarrow_dtype.value_type.to_pandas_dtype())

    def holds(self, type_: pa.DataType) -> bool:
        """True for columns of the same shape and values, and for columns of nulls."""
        return tensor_type(type_) == self.pyarrow_dtype or bool(pa.types.is_null(type_))

    def __from_arrow__(self, array: _ArrowArray) -> TensorColumn:
        return TensorColumn(as_tensors(array, self.pyarrow_dtype))


class TensorColumn(NestedArray):
    """Extension array of arrays of one shape."""

    _noun = "arrays"
    _hint = "for their numbers call .images.vectors(column)"

    def __init__(self, values: pa.Array | pa.ChunkedArray) -> None:
        super().__init__(values)
        self._dtype = TensorDtype(values.type)

    @classmethod
    def _to_arrow(cls, values: Iterable[Any], dtype: Dtype | None) -> pa.Array | pa.ChunkedArray:
        if not isinstance(dtype, TensorDtype):
            raise OperandError("arrays of one shape: name their dtype, such as 'float32[3]'")
        type_ = dtype.pyarrow_dtype
        array = arrow_of(values, type_, lambda column: as_tensors(column, type_))
        if array is not None:
            return array
        rows = [None if is_missing(value) else _row(value, dtype) for value in values]
        return tensor_array(rows, type_)

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.ChunkedArray:
        lists = as_lists(self._pa_type)
        array = pa.chunked_array([_lists_of(chunk) for chunk in self._pa_array.chunks], lists)
        return array if type is None else array.cast(type)

    def _objects(self) -> Iterator[np.ndarray | None]:
        shape = self.dtype.shape
        for chunk in self._pa_array.chunks:
            for row in range(len(chunk)):
                storage = chunk.storage.slice(row, 1)
                yield None if storage.null_count else _flat(storage).reshape(shape)

    def _bytes(self) -> Iterator[bytes | None]:
        return (None if value is None else value.tobytes() for value in self._objects())

    def _is_one(self, value: object) -> bool:
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.ndim <= len(self.dtype.shape)
        return super()._is_one(value)

    def numbers(self) -> np.ndarray | None:
        """All rows as one read-only array (n, ...), if possible a view; None if a row is null."""
        storage = one_chunk(self._pa_array).storage
        if storage.null_count:
            return None
        return _flat(storage).reshape(len(storage), *self.dtype.shape)


def tensor_array(
    rows: np.ndarray | Sequence[np.ndarray | None], type_: pa.FixedShapeTensorType
) -> pa.Array:
    """Arrow array of rows of the type's shape, None for null; values are cast."""
    dtype = np.dtype(type_.value_type.to_pandas_dtype())
    shape, mask = tuple(type_.shape), None
    if isinstance(rows, np.ndarray):
        values = rows.astype(dtype, copy=False)
    else:
        values = np.zeros((len(rows), *shape), dtype)
        for row, value in enumerate(rows):
            if value is not None:
                values[row] = value
        if any(value is None for value in rows):
            mask = pa.array([value is None for value in rows])
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type_.value_type)
    storage = pa.FixedSizeListArray.from_arrays(flat, type=type_.storage_type, mask=mask)
    return pa.ExtensionArray.from_storage(type_, storage)


def as_tensors(array: pa.Array | pa.ChunkedArray, type_: pa.FixedShapeTensorType) -> Any:
    """Convert an Arrow column of tensors or lists to tensors.

    Lists are nested as the shape, or flat.
    """
    if array.type == type_:
        return array
    if pa.types.is_null(array.type):
        return tensor_array([None] * len(array), type_)
    column = one_chunk(array)
    shape = tuple(type_.shape)
    if isinstance(column.type, pa.FixedShapeTensorType):
        if tuple(column.type.shape) != shape:
            raise pa.ArrowInvalid(f"{column.type} is no {type_}")
        column = column.storage
    present = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.drop_null()
    count, lengths = len(values), []
    while is_any_list(values.type):
        items = values.flatten()
        lengths.append(len(items) // max(1, len(values)))
        if (pc.list_value_length(values).to_numpy(zero_copy_only=False) != lengths[-1]).any():
            raise pa.ArrowInvalid("lists differ in length")
        values = items
    if values.null_count and not pa.types.is_floating(values.type):
        raise pa.ArrowInvalid("a list has nulls")
    if count and tuple(lengths) not in (shape, (math.prod(shape),)):
        raise pa.ArrowInvalid(f"lists of {lengths} values are no array of shape {shape}")
    dense = values.to_numpy(zero_copy_only=False).reshape(count, *shape)
    if count == len(column):
        return tensor_array(dense, type_)
    rows = iter(dense)
    return tensor_array([next(rows) if is_present else None for is_present in present], type_)


def _lists_of(chunk: pa.Array) -> pa.FixedSizeListArray:
    """Nested lists of fixed size over the memory of tensors."""
    storage, (length, *edges) = chunk.storage, chunk.type.shape
    size = storage.type.list_size
    lists = storage.values.slice(storage.offset * size, len(storage) * size)
    for edge in reversed(edges):
        lists = pa.FixedSizeListArray.from_arrays(lists, edge)
    mask = storage.is_null() if storage.null_count else None
    return pa.FixedSizeListArray.from_arrays(lists, length, mask=mask)


def _flat(storage: pa.FixedSizeListArray) -> np.ndarray:
    return storage.flatten().to_numpy(zero_copy_only=False)


def _row(value: object, dtype: TensorDtype) -> np.ndarray:
    """A user's value as an array of the dtype's shape."""
    array = np.asarray(value)
    if array.dtype == object:  # of pandas: nested lists of parquet are arrays of arrays
        array = np.array(_as_lists(value), None)
    if array.shape not in (dtype.shape, (math.prod(dtype.shape),)):
        raise OperandError(
            f"a column of {dtype} takes arrays of shape {dtype.shape}, and a row has {array.shape}"
        )
    if not np.can_cast(array.dtype, dtype.value_dtype, "same_kind"):
        raise OperandError(f"a column of {dtype} takes no values of {array.dtype}")
    return array.reshape(dtype.shape)


def _as_lists(value: object) -> Any:
    if isinstance(value, (np.ndarray, list, tuple)):
        return [_as_lists(item) for item in value]
    return value


def is_missing(value: object) -> bool:
    """True for None and for pandas' and NumPy's nulls."""
    return value is None or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


NestedDtype.array_class, TensorDtype.array_class = NestedColumn, TensorColumn


@make_array_nonempty.register(NestedDtype)
def _two_rows(dtype: NestedDtype) -> NestedColumn:
    type_ = dtype.pyarrow_dtype
    row: Any = {} if pa.types.is_struct(type_) else []
    row = [None] * type_.list_size if pa.types.is_fixed_size_list(type_) else row
    return NestedColumn(pa.chunked_array([pa.array([row, row], type_)]))


@make_array_nonempty.register(TensorDtype)
def _two_arrays(dtype: TensorDtype) -> TensorColumn:
    zeros = np.zeros((2, *dtype.shape), dtype.value_dtype)
    return TensorColumn(pa.chunked_array([tensor_array(zeros, dtype.pyarrow_dtype)]))
