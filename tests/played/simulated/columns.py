"""pylibcudf's columns over host memory: from Arrow, and to Arrow without a copy."""

import numpy as np
import pyarrow as pa
import pylibcudf as plc
from pylibcudf.types import TypeId

from simulated.counts import count
from simulated.memory import Span, allocated, to_host
from simulated.streams import Stream

_RealColumn, _RealTable = plc.Column, plc.Table

_NUMBERS = [getattr(pa, f"{kind}int{bits}")() for kind in ("", "u") for bits in (8, 16, 32, 64)]
_TIMES = [make(unit) for make in (pa.timestamp, pa.duration) for unit in ("s", "ms", "us", "ns")]
_FLAT = [*_NUMBERS, pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.date32(), *_TIMES]
_ARROW = {plc.DataType.from_arrow(type_).id(): type_ for type_ in _FLAT}
_DECIMALS = {
    TypeId.DECIMAL32: (pa.decimal32, 9),
    TypeId.DECIMAL64: (pa.decimal64, 18),
    TypeId.DECIMAL128: (pa.decimal128, 38),
}
_REFUSED = (
    pa.types.is_dictionary,
    pa.types.is_time,
    pa.types.is_map,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date64,
)


def arrow_type(dtype):
    """Arrow's type of libcudf's."""
    if dtype.id() in _DECIMALS:
        make, digits = _DECIMALS[dtype.id()]
        return make(digits, -dtype.scale())
    return _ARROW[dtype.id()]


class _IsReal(type):
    """Real instances are instances too: cuDF asks."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.__mro__[1])


class Column(_RealColumn, metaclass=_IsReal):
    """A column whose buffers lie in host memory."""

    def copy(self, stream=None, mr=None):
        return from_arrow(to_arrow(self))

    def with_mask(self, mask, null_count, validate=True):
        parts = self.offset(), self.children()
        return Column(self.type(), self.size(), self.data(), mask, null_count, *parts)

    @staticmethod
    def from_arrow(obj, dtype=None, stream=None, mr=None):
        count("to_device", obj.nbytes)
        return from_arrow(one(obj))

    def to_arrow(self, metadata=None, stream=None):
        array = to_arrow(self)
        to_host(array.nbytes)
        return named(array, metadata)

    @classmethod
    def from_array_interface(cls, obj, stream=None):
        count("to_device", obj.nbytes)
        return numbers(np.asarray(obj))

    @classmethod
    def from_cuda_array_interface(cls, obj, stream=None):
        there = obj.__cuda_array_interface__
        (size,), dtype = there["shape"], np.dtype(there["typestr"])
        assert there.get("strides") is None
        if size > 2**31 - 1:
            raise ValueError("Flat size exceeds size_type limit")
        span = Span(there["data"][0], size * dtype.itemsize, obj)
        return Column(_type_of(dtype), size, span, None, 0, 0, [])

    @classmethod
    def from_array(cls, obj, stream=None):
        on_device = hasattr(obj, "__cuda_array_interface__")
        return (cls.from_cuda_array_interface if on_device else cls.from_array_interface)(obj)

    @staticmethod
    def struct_from_children(children):
        children = list(children)
        first = children[0]
        shape = first.size(), first.null_count()
        if any((child.size(), child.null_count()) != shape for child in children):
            raise ValueError("All child columns must have the same size and null count.")
        type_ = plc.DataType(TypeId.STRUCT)
        return Column(type_, shape[0], None, first.null_mask(), shape[1], 0, children)

    @staticmethod
    def from_scalar(scalar, size, stream=None, mr=None):
        return from_arrow(pa.repeat(scalar.value, size))

    @staticmethod
    def from_iterable_of_py(obj, dtype=None, stream=None):
        return from_arrow(pa.array(list(obj), None if dtype is None else arrow_type(dtype)))

    @staticmethod
    def all_null_like(like, size, stream=None, mr=None):
        return from_arrow(pa.nulls(size, to_arrow(like).type))

    def to_scalar(self, stream=None, mr=None):
        return Scalar(to_arrow(self)[0])

    def struct_view(self):
        return _Nested(self)

    list_view = struct_view

    def device_buffer_size(self):
        own = sum(span.size for span in (self.data(), self.null_mask()) if span is not None)
        return own + sum(child.device_buffer_size() for child in self.children())


class _Nested:
    """The parts of a column of lists or structs."""

    def __init__(self, column):
        self._column = column

    def child(self):
        return self._column.child(1)

    def offsets(self):
        return self._column.child(0)

    def get_sliced_child(self, index=None, stream=None):
        column = self._column
        if index is None:
            offsets = to_arrow(column).offsets
            return part(self.child(), *(offsets[end].as_py() for end in (0, -1)))
        return part(column.child(index), column.offset(), column.offset() + column.size())


class Scalar:
    """A value on the device."""

    def __init__(self, value=None):
        self.value = value

    def type(self):
        return plc.DataType.from_arrow(self.value.type)

    def is_valid(self, stream=None):
        count("waits")
        return self.value.is_valid

    def to_py(self, stream=None):
        to_host(8)
        return self.value.as_py()

    def to_arrow(self, metadata=None, stream=None):
        return named(pa.array([self.to_py()], self.value.type), metadata)[0]

    @classmethod
    def from_py(cls, value, dtype=None, stream=None):
        nested = dtype is not None and dtype.id() in (TypeId.LIST, TypeId.STRUCT)
        return cls(pa.scalar(value, None if dtype is None or nested else arrow_type(dtype)))

    @classmethod
    def from_arrow(cls, value, dtype=None, stream=None):
        return cls(value)

    @classmethod
    def from_numpy(cls, value, stream=None):
        return cls(pa.scalar(value))

    @classmethod
    def empty_like(cls, column, *args):
        return cls(pa.scalar(None, to_arrow(column).type))


class Table(_RealTable, metaclass=_IsReal):
    def to_arrow(self, metadata=None, stream=None):
        metadata = metadata or [None] * self.num_columns()
        columns = [c.to_arrow(m) for c, m in zip(self.columns(), metadata, strict=True)]
        names = [getattr(each, "name", str(n)) for n, each in enumerate(metadata)]
        return pa.table(columns, names=names)

    @staticmethod
    def from_arrow(table, dtype=None, stream=None, mr=None):
        return Table(list(map(Column.from_arrow, table.columns)))

    def copy(self, stream=None, mr=None):
        return Table([column.copy() for column in self.columns()])


def one(array):
    """A chunked array as one."""
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def numbers(array):
    """A host array as a column."""
    return Column(_type_of(array.dtype), len(array), allocated(array), None, 0, 0, [])


def _type_of(dtype):
    return plc.DataType(getattr(TypeId, "BOOL8" if dtype.kind == "b" else dtype.name.upper()))


def mask_of(valid):
    """Which rows are valid, as a mask and the number that are not."""
    bits = np.packbits(valid, bitorder="little")
    return allocated(np.pad(bits, (0, -len(bits) % 64))), int((~valid).sum())


def valid_rows(column):
    """Which rows of a column are valid."""
    if column.null_mask() is None:
        return np.ones(column.size(), np.bool_)
    bits = np.unpackbits(np.frombuffer(_buffer(column.null_mask()), np.uint8), bitorder="little")
    return bits[column.offset() : column.offset() + column.size()].astype(np.bool_)


def part(column, start, stop):
    """Some rows as libcudf's slice has them: an offset, and all of the memory."""
    parts = column.data(), column.null_mask()
    begin = column.offset() + start
    made = Column(column.type(), stop - start, *parts, 0, begin, column.children())
    nulls = int((~valid_rows(made)).sum())
    return Column(column.type(), stop - start, *parts, nulls, begin, column.children())


def _buffer(span):
    """The memory of a span, whose address pins it as libcudf's asking does."""
    if span is None or not span.size:
        return None
    Stream.null.catch_up()
    return pa.foreign_buffer(span.ptr, span.size, span)


def to_arrow(column):
    """A column as Arrow, whose structs have numbers for names."""
    id_, rows, offset = column.type().id(), column.size(), column.offset()
    mask, data, children = _buffer(column.null_mask()), _buffer(column.data()), column.children()
    nothing = pa.py_buffer(b"")
    if id_ == TypeId.STRUCT:
        fields = [to_arrow(part(child, offset, offset + rows)) for child in children]
        if not fields:
            return pa.array([{}] * rows, pa.struct([]))
        missing = pa.array(~valid_rows(column))
        return pa.StructArray.from_arrays(fields, [*map(str, range(len(fields)))], mask=missing)
    if id_ == TypeId.LIST:
        values = to_arrow(children[1])
        offsets = _buffer(children[0].data())
        if offsets is None:
            return pa.array([], pa.list_(values.type))
        offsets = offsets.slice(children[0].offset() * 4)
        type_, parts = pa.list_(values.type), [values]
        return pa.Array.from_buffers(type_, rows, [mask, offsets], offset=offset, children=parts)
    type_ = arrow_type(column.type())
    if id_ == TypeId.STRING:
        offsets = _buffer(children[0].data()) if children else None
        if offsets is None:
            return pa.nulls(rows, type_)
        return pa.Array.from_buffers(type_, rows, [mask, offsets, data or nothing], offset=offset)
    if id_ == TypeId.BOOL8:
        data = pa.py_buffer(
            np.packbits(np.frombuffer(data or nothing, np.bool_), bitorder="little")
        )
    return pa.Array.from_buffers(type_, rows, [mask, data or nothing], offset=offset)


def from_arrow(array):
    """Arrow as a column, copied; what libcudf refuses is an error."""
    type_, rows, nulls = array.type, len(array), array.null_count
    if any(is_refused(type_) for is_refused in _REFUSED):
        raise ValueError(f"libcudf takes no {type_}")
    if pa.types.is_null(type_):
        return Column(plc.DataType(TypeId.EMPTY), rows, None, None, rows, 0, [])
    mask = mask_of(_to_numpy(array.is_valid()))[0] if nulls else None

    def made(id_, data, children=()):
        dtype = id_ if isinstance(id_, plc.DataType) else plc.DataType(id_)
        return Column(dtype, rows, data, mask, nulls, 0, list(children))

    if pa.types.is_struct(type_):
        return made(TypeId.STRUCT, None, map(from_arrow, array.flatten()))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        lengths = _to_numpy(array.value_lengths().fill_null(0))
        return made(TypeId.LIST, None, (_offsets(lengths), from_arrow(array.flatten())))
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        texts = [(text or "").encode() for text in array.to_pylist()]
        data = allocated(np.frombuffer(b"".join(texts), np.uint8))
        return made(TypeId.STRING, data, [_offsets([len(text) for text in texts])])
    if pa.types.is_boolean(type_):
        return made(TypeId.BOOL8, allocated(_to_numpy(array.fill_null(False)).astype(np.uint8)))
    if pa.types.is_timestamp(type_):
        type_ = pa.timestamp(type_.unit)
    width, values = type_.bit_width // 8, array.buffers()[1]
    data = np.zeros(rows * width, np.uint8)
    if values is not None:
        data = np.frombuffer(values, np.uint8)[array.offset * width :][: rows * width]
    return made(plc.DataType.from_arrow(type_), allocated(data))


def _to_numpy(array):
    return array.to_numpy(zero_copy_only=False)


def _offsets(lengths):
    ends = np.cumsum([0, *lengths])
    if ends[-1] > 2**31 - 1:
        raise OverflowError("CUDF failure: exceeds the limit")
    return numbers(ends.astype(np.int32))


def named(array, metadata):
    """Arrow with the names of struct fields, and what else a type of cuDF's says."""
    if metadata is None or isinstance(metadata, str):
        return array
    children, type_ = metadata.children_meta, array.type
    if pa.types.is_struct(type_):
        parts = [named(array.field(n), child) for n, child in enumerate(children)]
        names = [child.name for child in children]
        return pa.StructArray.from_arrays(parts, names, mask=array.is_null())
    if pa.types.is_list(type_) and len(children) > 1:
        values, buffers = named(array.values, children[1]), array.buffers()[:2]
        rows = len(array), buffers
        return pa.Array.from_buffers(
            pa.list_(values.type), *rows, offset=array.offset, children=[values]
        )
    if pa.types.is_decimal(type_) and metadata.precision:
        make, _ = _DECIMALS[plc.DataType.from_arrow(type_).id()]
        return array.cast(make(metadata.precision, type_.scale))
    if pa.types.is_timestamp(type_) and getattr(metadata, "timezone", ""):
        return array.cast(pa.timestamp(type_.unit, metadata.timezone))
    return array
