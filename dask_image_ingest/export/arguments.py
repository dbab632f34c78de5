"""What a user passes → options that make sense."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from dask.utils import parse_bytes

from dask_image_ingest.arguments import is_utf8, is_whole, shown, whole_number
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.export.baseline import require_turbojpeg
from dask_image_ingest.export.job import Options
from dask_image_ingest.export.jpeg import Encode, Jpeg, make_jpeg
from dask_image_ingest.export.local_place import LocalPlace
from dask_image_ingest.export.members import Members, make_members
from dask_image_ingest.export.place import EXPORT, Place, Writer
from dask_image_ingest.export.remote_place import RemotePlace
from dask_image_ingest.export.sources import makers_of_images
from dask_image_ingest.export.stage import image_columns, metadata_columns
from dask_image_ingest.storage import local_path

__all__ = ["make_options", "place_of", "split_path"]

_SAMPLES = 10_000


def split_path(path: Any, storage_options: dict[str, Any] | None) -> tuple[Place, str]:
    """The folder that a path of shards leads to, and how they are called in it.

    Raises
    ------
    ArgumentError
        If the path has no field for the number, or is of no kind that can be written.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentError(f"{path!r} is no path")
    folder, _, template = text.rpartition("/")
    if not _is_template(template) or _fields(folder) != [] or "\0" in folder:
        raise ArgumentError(
            f"{text!r} is no name for shards: it needs one field for their number, in its last "
            "part, and ends with .tar, as 'out/{shard:06d}.tar' does"
        )
    return place_of(folder or ("/" if text[0] == "/" else "."), EXPORT, storage_options), template


def place_of(folder: str, writer: Writer, storage_options: dict[str, Any] | None) -> Place:
    """The folder at a path or URL.

    Raises
    ------
    ArgumentError
        If it is of no kind that can be written.
    """
    local = local_path(folder) if "://" in folder else folder
    if local is not None:
        return LocalPlace(os.path.abspath(os.path.expanduser(local)), writer)
    if "::" in folder:
        raise ArgumentError(f"{folder!r} is a chain of file systems, which is read and not written")
    return RemotePlace(folder.rstrip("/"), storage_options, writer)


def make_options(
    frame: Any,
    template: str,
    *,
    samples_per_shard: Any,
    bytes_per_shard: Any,
    shuffle: Any,
    members: Any,
    sidecar: Any,
    index: bool,
    jpeg: Any,
    errors: Any,
    drop_bad_images: bool,
) -> Options:
    """Check the arguments of an export, one against the other and against the frame.

    Raises
    ------
    ArgumentError
    MissingDependencyError
        If a library is missing that ``jpeg`` needs.
    """
    if sidecar not in ("parquet", None):
        raise ArgumentError(f"sidecar={sidecar!r}; choose 'parquet' or None")
    if errors not in ("raise", "drop"):
        raise ArgumentError(f"errors={errors!r}; choose 'raise' or 'drop'")
    if shuffle is not None and not is_whole(shuffle):
        raise ArgumentError(f"shuffle={shown(shuffle)}: pass a number, the seed of the order")
    columns = metadata_columns(frame)
    if drop_bad_images and "error" not in frame.columns:
        raise ArgumentError(
            "drop_bad_images=True needs the column 'error' of the read, which the frame has not"
        )
    if bytes_per_shard is None and samples_per_shard is None:
        samples_per_shard = _SAMPLES
    makers = {name: list(makers_of_images(frame, name)) for name in image_columns(frame)}
    chosen = make_members(members, columns, list(makers))
    how = _jpeg(jpeg)
    _refuse_other_pixels(makers, chosen, how)
    return Options(
        template=template,
        samples_per_shard=None
        if samples_per_shard is None
        else whole_number("samples_per_shard", samples_per_shard, 1),
        bytes_per_shard=_bytes(bytes_per_shard),
        shuffle=None if shuffle is None else int(shuffle),
        members=chosen,
        sidecar=sidecar is not None,
        index=bool(index),
        jpeg=how,
        drop_rows=errors == "drop",
        drop_bad_images=bool(drop_bad_images),
    )


def _refuse_other_pixels(makers: Mapping[str, Sequence[str]], members: Members, jpeg: Jpeg) -> None:
    """Refuse to copy stored images where the frame shows others, which nobody asked to encode."""
    encoded = {made.columns for made in members.pixels}
    for name, made in makers.items():
        if made and name not in encoded and members.copies_images:
            raise ArgumentError(
                f"the pixels of {name!r} come from {made[0]}, and to_webdataset would write the "
                f"stored images. members={{'jpg': {name!r}}} encodes the pixels instead; "
                f"drop(columns={name!r}) first says that the stored images are meant"
            )
    if encoded and isinstance(jpeg, Encode) and jpeg.size is not None:
        raise ArgumentError(
            f"Encode(size=...) is for stored images, and members= makes one of the pixels in "
            f"{members.pixels[0].columns!r}: resize them where they are made"
        )


def _is_template(template: str) -> bool:
    if not template.endswith(".tar") or _fields(template) != ["shard"]:
        return False
    if re.search(r"\d{4}", template.partition("{")[2].partition("}")[0]):
        return False  # a width that no file system has room for, and memory may not either
    try:
        names = {template.format(shard=number) for number in (0, 1, 10_000_000)}
    except (ValueError, KeyError, IndexError, OverflowError):
        return False
    hidden = template.startswith((".", "_"))
    return len(names) == 3 and not hidden and all(map(_is_file_name, names))


def _is_file_name(name: str) -> bool:
    fits = is_utf8(name) and len(name.encode()) <= 255
    return fits and name.isprintable() and not any(sign in name for sign in "/ ")


def _fields(text: str) -> list[str] | None:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError:
        return None


def _jpeg(jpeg: Any) -> Jpeg:
    made = make_jpeg(jpeg)
    if made == "baseline":
        require_turbojpeg()
    return made


def _bytes(size: Any) -> int | None:
    if size is None:
        return None
    try:
        nbytes = int(parse_bytes(size))
    except (ValueError, TypeError, AttributeError, OverflowError):
        nbytes = 0
    if nbytes < 1:
        raise ArgumentError(f"bytes_per_shard={size!r}: pass bytes, or a text such as '1 GB'")
    return nbytes
