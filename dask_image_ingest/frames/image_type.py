"""The Arrow type of decoded images."""

import pyarrow as pa

#: Decoded pixels of one row: row-major ``height x width x channels``, with its own shape, so that a
#: row keeps its meaning through any filter, merge, shuffle or file.
IMAGE = pa.struct(
    [
        pa.field("data", pa.large_list(pa.field("item", pa.uint8(), nullable=False))),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("channels", pa.int32()),
    ]
)
