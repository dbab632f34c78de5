"""cuDF columns over host memory: all of cuDF that needs no kernel takes them for its own."""

import cudf
import numpy as np
import pylibcudf as plc

from dask_image_ingest.frames.image_type import IMAGE


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
    id_ = getattr(plc.TypeId, array.dtype.name.upper())
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
