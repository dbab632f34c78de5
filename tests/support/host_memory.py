"""cuDF columns over host memory: all of cuDF that needs no kernel takes them for its own."""

import types

import cudf
import numpy as np
import pyarrow as pa
import pylibcudf as plc
from cudf.core.column import column as cudf_column
from cudf.utils.dtypes import cudf_dtype_from_pa_type, cudf_dtype_to_pa_type

from dask_image_ingest.frames.cudf import columns
from dask_image_ingest.frames.image_dtype import IMAGE


class Host:
    """Memory of a NumPy array, shown as if it were a GPU's."""

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.ptr, self.size = self.array.ctypes.data, self.array.nbytes

    @property
    def __cuda_array_interface__(self):
        return dict(self.array.reshape(-1).view(np.uint8).__array_interface__)


def column(array):
    """Numbers as a column."""
    array = np.asarray(array)
    name = array.dtype.name.upper()
    id_ = getattr(plc.TypeId, "BOOL8" if name == "BOOL" else name)
    return plc.Column(plc.DataType(id_), len(array), Host(array), None, 0, 0, [])


def lists(arrays):
    """One-dimensional arrays as a column of lists."""
    ends = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    children = [column(ends), column(np.concatenate(arrays))]
    return plc.Column(plc.DataType(plc.TypeId.LIST), len(arrays), None, None, 0, 0, children)


def images(arrays):
    """Images as a column."""
    shapes = np.array([array.shape for array in arrays], np.int32)
    data = lists([array.reshape(-1) for array in arrays])
    edges = [column(np.ascontiguousarray(shapes[:, axis])) for axis in range(3)]
    return plc.Column.struct_from_children([data, *edges])


def first_rows(nested, count):
    """The first rows of a column of lists or structs, as libcudf's slice makes them: all of it."""
    return plc.Column(nested.type(), count, None, None, 0, 0, nested.children())


def last_rows(nested, count):
    """The last rows of a column, as libcudf's slice makes them: all of it, with an offset."""
    rest = nested.size() - count
    return plc.Column(nested.type(), count, nested.data(), None, 0, rest, nested.children())


def frame(columns, index=None):
    """A frame of such columns; one named ``image...`` is of images."""
    names = {"data": {"offsets": {}, "element": {}}}
    struct = {field: names.get(field, {}) for field in IMAGE.names}
    (rows,) = {column.size() for column in columns.values()}
    return cudf.DataFrame.from_pylibcudf(
        plc.Table(list(columns.values())),
        metadata={
            "columns": list(columns),
            "child_names": {n: struct if n.startswith("image") else {} for n in columns},
            "index": cudf.RangeIndex(rows) if index is None else index,
        },
    )


def addresses(data):
    """Where the buffers of a column lie."""
    column = data._column.plc_column if isinstance(data, cudf.Series) else data
    own = [] if column.data() is None else [column.data().ptr]
    return own + [address for child in column.children() for address in addresses(child)]


def from_arrow(array):
    """An Arrow array as the column that libcudf makes of it; what it refuses is an error here."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    type_, rows, data = array.type, len(array), None
    if pa.types.is_struct(type_):
        kind, children = plc.DataType(plc.TypeId.STRUCT), map(from_arrow, array.flatten())
    elif pa.types.is_list(type_):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        kind = plc.DataType(plc.TypeId.LIST)
        children = column(offsets), from_arrow(array.flatten())
    elif pa.types.is_string(type_) or pa.types.is_large_string(type_):
        texts = [(text or "").encode() for text in array.to_pylist()]
        kind, data = plc.DataType(plc.TypeId.STRING), Host(np.frombuffer(b"".join(texts), np.uint8))
        children = (column(np.cumsum([0, *map(len, texts)]).astype(np.int32)),)
    elif pa.types.is_boolean(type_):
        kind, children = plc.DataType.from_arrow(type_), ()
        data = Host(array.fill_null(False).to_numpy(zero_copy_only=False))
    else:
        kind, children, width = plc.DataType.from_arrow(type_), (), type_.bit_width // 8
        buffer = array.buffers()[1] or b""
        data = Host(np.frombuffer(buffer, np.uint8)[array.offset * width :][: rows * width])
    mask = _mask(array.is_valid().to_numpy(zero_copy_only=False)) if array.null_count else None
    return plc.Column(kind, rows, data, mask, array.null_count, 0, list(children))


def to_arrow(column, type_):
    """A column as the Arrow array that libcudf makes of it."""
    children, data = column.children(), _buffer(column.data())
    rows, buffers = column.size(), [_buffer(column.null_mask())]
    if pa.types.is_struct(type_):
        children = [to_arrow(*pair) for pair in zip(children, (f.type for f in type_), strict=True)]
    elif pa.types.is_list(type_):
        buffers.append(_buffer(children[0].data()) or pa.py_buffer(bytes(4)))
        children = [to_arrow(children[1], type_.value_type)]
    elif pa.types.is_string(type_):
        offsets = _buffer(children[0].data()) if children else None
        buffers += [offsets or pa.py_buffer(bytes(4)), data or pa.py_buffer(b"")]
        children = []
    elif pa.types.is_boolean(type_):
        bits = np.packbits(np.frombuffer(data or b"", np.uint8), bitorder="little")
        buffers.append(pa.py_buffer(bits))
    else:
        buffers.append(data or pa.py_buffer(b""))
    return pa.Array.from_buffers(type_, rows, buffers, offset=column.offset(), children=children)


def _mask(valid):
    bits = np.packbits(valid, bitorder="little")
    return Host(np.pad(bits, (0, -len(bits) % 64)))


def _buffer(span):
    return pa.foreign_buffer(span.ptr, span.size, span) if span is not None and span.size else None


class Played(plc.Column):
    """What makes columns of memory, without a GPU."""

    from_arrow = staticmethod(from_arrow)
    from_array = from_cuda_array_interface = staticmethod(column)


def play(monkeypatch, *modules):
    """Have these modules of the package, and cuDF's way to Arrow and back, use host memory."""
    transform = types.SimpleNamespace(bools_to_mask=_bools_to_mask)
    played = types.SimpleNamespace(**vars(plc) | {"Column": Played, "transform": transform})
    for module in modules:
        stand_ins = {"plc": played, "cupy": np, "require_gpu": lambda: None, "_read": _read}
        stand_ins["_wait_for_cupy"] = lambda: None  # host memory has no streams
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    column_class = cudf_column.ColumnBase
    monkeypatch.setattr(column_class, "from_arrow", staticmethod(_cudf_from_arrow))
    monkeypatch.setattr(column_class, "to_arrow", _cudf_to_arrow)
    monkeypatch.setattr(column_class, "notnull", _not_null)


def _cudf_from_arrow(array):
    return cudf_column.ColumnBase.create(from_arrow(array), cudf_dtype_from_pa_type(array.type))


def _cudf_to_arrow(self):
    made = to_arrow(self.plc_column, cudf_dtype_to_pa_type(self.dtype))
    return cudf_column._handle_nulls(made)


def _not_null(self):
    valid = to_arrow(self.plc_column, cudf_dtype_to_pa_type(self.dtype)).is_valid()
    return cudf_column.ColumnBase.create(from_arrow(valid), np.dtype(np.bool_))


def _bools_to_mask(bools):
    valid = np.frombuffer(_buffer(bools.data()), np.bool_)
    return _mask(valid), int((~valid).sum())


class _Array(np.ndarray):
    def get(self):
        return np.asarray(self)


def _read(images):
    struct = to_arrow(images._column.plc_column, images.dtype.to_arrow())
    data, *edges = (struct.field(name) for name in IMAGE.names)
    return columns._Column(
        flat=np.asarray(data.values).view(_Array),
        offsets=data.offsets.to_pylist(),
        shapes=np.stack([edge.fill_null(0).to_numpy() for edge in edges], axis=1),
        present=struct.is_valid().to_pylist(),
    )
