"""The meaning of pixels of decoded images."""

from typing import Literal

__all__ = ["CHANNELS", "Mode"]

#: Colour, colour and alpha, grey, or the number of a class.
Mode = Literal["RGB", "RGBA", "L", "labels"]

CHANNELS: dict[Mode, int] = {"RGB": 3, "RGBA": 4, "L": 1, "labels": 1}
