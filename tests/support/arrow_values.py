"""Three values of each Arrow type, at the edges of the type, also in lists and structs."""

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa

_MOMENT = datetime.datetime(2020, 1, 2, 3, 4, 5, 678901)
_ODD_ZONE = pa.timestamp("us", "Europe/Berlin")  # offsets of 1890 have seconds
_INTEGERS = [(pa.int8(), -128), (pa.uint8(), 255), (pa.int16(), -(2**15)), (pa.uint16(), 2**16 - 1)]
_INTEGERS += [(pa.int32(), -(2**31)), (pa.uint32(), 2**32 - 1), (pa.int64(), -(2**63))]
_INTEGERS += [(pa.uint64(), 2**64 - 1), (pa.int64(), 2**53 + 1), (pa.uint64(), 2**63 + 5)]

#: Numbers, text and bytes: the types that functions give.
PLAIN = [
    *(pa.array([value, None, 1], type_) for type_, value in _INTEGERS),
    pa.array([np.float16(0.1), None, np.finfo("f2").smallest_subnormal], pa.float16()),
    pa.array([0.1, None, 1e38], pa.float32()),
    pa.array([0.1, 5e-324, -1e308], pa.float64()),
    pa.array([True, None, False]),
    pa.array(["ä\n\x7f", None, ""]),
    pa.array([b"\0\xff", None, b""]),
]

#: Those that only columns have.
OTHERS = [
    pa.array([Decimal("1.10"), None, Decimal("-12345678.05")], pa.decimal128(10, 2)),
    pa.array([Decimal("12345678901234567890.123456789"), Decimal("1E-9"), None],
             pa.decimal128(38, 9)),
    pa.array([Decimal("1" * 50), None, Decimal(-5)], pa.decimal256(60, 0)),
    pa.array([_MOMENT.date(), None, datetime.date(1, 1, 1)], pa.date32()),
    pa.array([_MOMENT.date(), None, datetime.date(9999, 12, 31)], pa.date64()),
    pa.array([_MOMENT.replace(microsecond=0), None, datetime.datetime(1, 1, 1)],
             pa.timestamp("s")),
    pa.array([_MOMENT, None, datetime.datetime(9999, 1, 1)], pa.timestamp("us")),
    pa.array([1577934245600, None, 1577934245678], pa.timestamp("ms", "UTC")),
    pa.array([1577934245678901234, None, -1], pa.timestamp("ns")),
    pa.array([_MOMENT, None, datetime.datetime(1800, 1, 1)], _ODD_ZONE),
    pa.array([1577934245678901234, None, -1], pa.timestamp("ns", "America/New_York")),
    pa.array([datetime.time(1, 2, 3), None, datetime.time(23, 59, 59)], pa.time32("s")),
    pa.array([datetime.time(1, 2, 3, 4), None, datetime.time(0)], pa.time64("us")),
    pa.array([86400 * 10**9 - 1, None, 1], pa.time64("ns")),
    pa.array([86400 * 200_000, None, -1], pa.duration("s")),
    pa.array([1, None, -1], pa.duration("ns")),
]  # fmt: skip

#: Those that no JSON field is read as.
UNREAD = [
    pa.array([b"ab", None, b"\xff\0"], pa.binary(2)),
    pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    pa.array(["a", None, "b"]).dictionary_encode(),
    pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), ["z", "a"], ordered=True),
    pa.array([7, None, 2**60]).dictionary_encode(),
    pa.array(OTHERS[0].to_pylist(), OTHERS[0].type).dictionary_encode(),
    pa.nulls(3),
]


def nested(values):
    """Lists, structs, and lists of structs of three values."""
    ends = pa.array([0, 2, 2, 3], pa.int32())
    missing = pa.array([False, True, False])
    structs = pa.StructArray.from_arrays([values, pa.array([0, 1, 2])], ["x y", "n"])
    return [
        pa.ListArray.from_arrays(ends, values, mask=missing),
        pa.StructArray.from_arrays([values], ["x"], mask=missing),
        pa.ListArray.from_arrays(ends, structs),
    ]
