"""Options of an export, its context for tasks, and the names of its files."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dask_image_ingest.arguments import check_choice, shown, whole_number
from dask_image_ingest.decode import MAX_PIXELS, Decoding, make_decoding
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.members import Members
from dask_image_ingest.storage import STAGING, OutputStore

#: Written first: what will be there. And last: what is there.
PLAN, MANIFEST = "_plan.json", "_manifest.json"

#: The rows that could not be written, with reasons.
LEFT_OUT = "_left_out.parquet"


@dataclass(frozen=True, slots=True)
class Options:
    """Options that decide which bytes are written."""

    template: str
    samples_per_shard: int | None
    bytes_per_shard: int | None
    shuffle: int | None
    members: Members
    sidecar: bool
    index: bool
    jpeg: Jpeg
    drop_rows: bool
    drop_bad_images: bool

    def files_of(self, number: int) -> list[str]:
        """The names of a shard and what lies beside it; the shard last, as it is written."""
        return file_names(self.template, self.sidecar, self.index, number)

    def described(self) -> dict[str, Any]:
        """Describe it in JSON, to read and to compare."""
        members = self.members
        described = asdict(self)
        described["jpeg"] = describe_jpeg(self.jpeg)
        described["members"] = {
            "copied": "all" if members.copied is None else sorted(members.copied),
            "left_out": sorted(members.left_out),
            "made": {made.extension: list(made.needs) for made in members.made},
        }
        return described


@dataclass(frozen=True)
class ExportContext:
    """An export under way.

    Attributes
    ----------
    output, options
        Where to write what.
    source_options
        For the file systems of the shards that are read.
    run
        The name of this attempt.
    pointers, planned
        Staged files: a batch for each source shard, and a batch for each shard to write.
    """

    output: OutputStore
    options: Options
    source_options: dict[str, Any] | None = field(default=None, hash=False)
    run: str = ""
    pointers: str = ""
    planned: str = ""


def staged_name(what: str) -> str:
    """A new name in the staging folder."""
    return f"{STAGING}/{what}-{uuid.uuid4().hex}"


def file_names(template: str, sidecar: bool, index: bool, number: int) -> list[str]:
    """The names of a shard and what lies beside it; the shard last, as it is written."""
    shard = template.format(shard=number)
    stem = shard.removesuffix(".tar")
    return [*[f"{stem}.parquet"] * sidecar, *[f"{stem}.idx"] * index, shard]


@dataclass(frozen=True)
class Encode:
    """Encoder settings of :func:`to_webdataset`: ``jpeg=Encode(quality=90, size=512)``.

    Every image is decoded as :func:`read_webdataset_images` decodes it (RGB, turned as its EXIF
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
        """Decode options, for the step before."""
        return make_decoding(
            device="cpu",
            size=self.size,
            resize=self.resize,
            mode="RGB",
            transform=None,
            max_pixels=MAX_PIXELS,
        )


#: None copies images as they are.
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


def describe_jpeg(jpeg: Jpeg) -> Any:
    """Describe it in JSON, to read and to compare."""
    if not isinstance(jpeg, Encode):
        return jpeg or "keep"
    size = jpeg.decoding.size
    return {**asdict(jpeg), "size": None if size is None else list(size)}
