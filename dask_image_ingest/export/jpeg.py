"""``jpeg=``: whether pictures leave as they are, as baseline JPEG, or encoded anew."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dask_image_ingest.arguments import check_choice, shown, whole_number
from dask_image_ingest.decode import MAX_PIXELS, Decoding, make_decoding
from dask_image_ingest.errors import ArgumentError

__all__ = ["Encode", "Jpeg", "describe_jpeg", "make_jpeg", "parse_jpeg"]


@dataclass(frozen=True)
class Encode:
    """How :func:`to_webdataset` encodes pictures anew: ``jpeg=Encode(quality=90, size=512)``.

    Every picture is decoded as :func:`read_webdataset_images` decodes it (RGB, turned as its EXIF
    says), and encoded as baseline JPEG without EXIF or a colour profile. A member ``jpg`` that
    ``members=`` makes of a column of images is encoded so, too, but for ``size`` and ``resize``.

    Parameters
    ----------
    quality
        1 to 100, as libjpeg counts.
    size, resize
        As for :func:`read_webdataset_images`; None keeps the size.
    subsampling
        Of colours: ``"420"``, ``"422"`` or ``"444"``.
    restart_rows
        Rows of blocks between restart markers, for decoders that begin at these in parallel. None
        writes no markers, which libjpeg-turbo decodes faster.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar").drop(columns=["image", "error"])
    >>> small = Encode(quality=90, size=64, resize="shorter")
    >>> written = to_webdataset(table, "small/{shard:03d}.tar", jpeg=small, errors="drop")
    >>> int(written["samples"].sum()), written.attrs["left_out"]["bad-image"]["first"]
    (51, ['0018'])
    """

    quality: int = 92
    size: int | tuple[int, int] | None = None
    resize: Literal["stretch", "crop", "pad", "shorter", "longer"] = "stretch"
    subsampling: Literal["420", "422", "444"] = "420"
    restart_rows: int | None = None

    def __post_init__(self) -> None:
        advice = "pass a whole number from 1 to 100"
        whole_number("quality", self.quality, 1, advice, most=100)
        check_choice("subsampling", self.subsampling, ("420", "422", "444"))
        if self.restart_rows is not None:
            advice = "pass a whole number from 1 to 65,535, or None for no restart markers"
            whole_number("restart_rows", self.restart_rows, 1, advice, most=65_535)
        _ = self.decoding  # checks the others

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings, as Pillow's JPEG encoder takes them."""
        restarts = {} if self.restart_rows is None else {"restart_marker_rows": self.restart_rows}
        return {
            "quality": self.quality,
            "subsampling": ":".join(self.subsampling),
            **restarts,
        }

    @property
    def decoding(self) -> Decoding:
        """How pictures are decoded before."""
        return make_decoding(
            device="cpu",
            size=self.size,
            resize=self.resize,
            mode="RGB",
            transform=None,
            max_pixels=MAX_PIXELS,
        )


#: None keeps pictures as they are.
Jpeg = Literal["baseline"] | Encode | None


def make_jpeg(jpeg: Any) -> Jpeg:
    """Read ``jpeg=``.

    Raises
    ------
    ArgumentError
        For anything but the two words and an :class:`Encode`.
    """
    if isinstance(jpeg, Encode):
        return jpeg
    if jpeg not in ("keep", "baseline"):
        raise ArgumentError(f"jpeg={shown(jpeg)}; choose 'keep', 'baseline' or Encode(...)")
    return "baseline" if jpeg == "baseline" else None


def parse_jpeg(text: str) -> Any:
    """What ``--jpeg`` says, as :func:`make_jpeg` takes it.

    >>> parse_jpeg("encode:quality=90,size=480x640").size
    (480, 640)

    Raises
    ------
    ArgumentError
    """
    word, _, settings = text.partition(":")
    if word != "encode":
        return text
    given: dict[str, Any] = {}
    for setting in settings.split(",") if settings else ():
        name, _, value = setting.partition("=")
        if name not in Encode.__dataclass_fields__:
            known = ", ".join(Encode.__dataclass_fields__)
            raise ArgumentError(f"--jpeg {text!r} sets {name!r}; encode has {known}")
        given[name] = value if name in ("resize", "subsampling") else _number(value, text)
    return Encode(**given)


def _number(value: str, text: str) -> Any:
    edges = value.split("x")
    if not all(edge.isdecimal() for edge in edges):
        raise ArgumentError(f"--jpeg {text!r}: {value!r} is neither a number nor a size as 480x640")
    numbers = tuple(map(int, edges))
    return numbers if len(numbers) > 1 else numbers[0]


def describe_jpeg(jpeg: Jpeg) -> Any:
    """For people and for comparison, as JSON knows it."""
    if not isinstance(jpeg, Encode):
        return jpeg or "keep"
    size = jpeg.decoding.size
    return {**asdict(jpeg), "size": None if size is None else list(size)}
