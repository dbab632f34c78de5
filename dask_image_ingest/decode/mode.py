"""The meaning of pixels of decoded images."""

from typing import Literal

#: Colour, colour and alpha, grey, the number of a class, or values as they are stored.
Mode = Literal["RGB", "RGBA", "L", "labels", "raw"]

#: Of ``"raw"`` the most: each image has its own.
CHANNELS: dict[Mode, int] = {"RGB": 3, "RGBA": 4, "L": 1, "labels": 1, "raw": 4}
