"""Arrow types, and what cuDF has for them."""

import datetime
from decimal import Decimal

import pyarrow as pa

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
NAIVE = NOON.replace(tzinfo=None)
DAY, MIDNIGHT = NOON.date(), NAIVE.replace(hour=0)
IN_BERLIN = pa.timestamp("us", "Europe/Berlin")

# A type, a value of it, and the value as cuDF has it.
HELD = [
    (pa.timestamp("us", "UTC"), NOON, NAIVE),
    (IN_BERLIN, NOON, NAIVE),
    (pa.timestamp("ns"), NAIVE, NAIVE),
    (pa.date32(), DAY, MIDNIGHT),
    (pa.date64(), DAY, MIDNIGHT),
    (pa.duration("s"), datetime.timedelta(1), datetime.timedelta(1)),
    (pa.decimal32(5, 2), Decimal("1.25"), Decimal("1.25")),
    (pa.decimal256(10, 2), Decimal("1.25"), Decimal("1.25")),
    (pa.float16(), 1.5, 1.5),
    (pa.bool_(), True, True),
    (pa.large_string(), "ä", "ä"),
    (pa.string_view(), "ä", "ä"),
    (pa.binary(), b"\0a", [0, 97]),
    (pa.binary(2), b"\0a", [0, 97]),
    (pa.list_(pa.binary()), [b"\0a", b"", None], [[0, 97], [], None]),
    (pa.list_(IN_BERLIN), [NOON, None], [NAIVE, None]),
    (pa.list_(pa.date32()), [DAY], [MIDNIGHT]),
    (pa.list_(pa.float32(), 2), [1, 2], [1, 2]),
    (pa.large_list(pa.int8()), [1, None], [1, None]),
    (pa.list_(pa.list_(pa.string())), [["ä"], None], [["ä"], None]),
    (
        pa.struct([("a", pa.int32()), ("b", pa.binary()), ("c", pa.list_(pa.binary()))]),
        {"a": None, "b": b"a", "c": [b"a", None]},
        {"a": None, "b": [97], "c": [[97], None]},
    ),
    (pa.list_(pa.struct([("b", pa.binary())])), [{"b": b"a"}, None], [{"b": [97]}, None]),
]

# Nothing says the same in cuDF.
REFUSED = [
    pa.time32("s"),
    pa.time64("us"),
    pa.decimal256(39, 2),
    pa.map_(pa.string(), pa.int64()),
    pa.list_(pa.time32("s")),
    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.time64("ns")))]),
]
