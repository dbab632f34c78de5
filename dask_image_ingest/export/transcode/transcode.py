"""Transcoding: stored images that become baseline JPEGs, or are re-encoded.

The plan needs their sizes, so they are made before it and wait in the staging folder. Each source's
are named by its version, the wanted rows and the options, so that a resumed run finds them again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from dask_image_ingest.decode import (
    MAX_PIXELS,
    Header,
    Origin,
    decode,
    read_header,
    read_jpeg_frame,
)
from dask_image_ingest.export.member_selection import EXPANDED, SOURCE, Row
from dask_image_ingest.export.options import Encode, Jpeg, Options
from dask_image_ingest.export.staged_tables import from_bytes, to_bytes
from dask_image_ingest.export.transcode.libjpeg_turbo import BaselineError, to_baseline
from dask_image_ingest.frames import get_backend
from dask_image_ingest.storage import STAGING, OutputStore
from dask_image_ingest.tar import ShardIndex, open_member, read_member

# Pixels that are in memory at once, unless a single image has more.
_PIXELS = 128 << 20

# What libjpeg takes of a side (its JPEG_MAX_DIMENSION).
_LONGEST_SIDE = 65_500


def transcode_images(
    rows: list[Row], url: str, content: Any, index: ShardIndex, jpeg: Jpeg, file: Any
) -> list[Row]:
    """Write the images that change to a file, and point there.

    Images are decoded in the order of their shard, whatever the order of the rows: the same images
    are decoded together, and give the same bytes.
    """
    transcoder = _Transcoder(rows, url, content, index, file)
    if isinstance(jpeg, Encode):
        transcoder.encode(jpeg)
    elif jpeg == "baseline":
        transcoder.to_baseline()
    return transcoder.rows


class _Transcoder:
    """Transcoder of the images of one shard."""

    def __init__(
        self, rows: list[Row], url: str, content: Any, index: ShardIndex, file: Any
    ) -> None:
        self.rows = list(rows)
        self._url = url
        self._content = content
        self._index = index
        self._file = file
        there = [
            (row.members[row.image][2], number)
            for number, row in enumerate(rows)
            if row.image is not None and row.members[row.image][1] == SOURCE
        ]
        self._numbers = [number for _, number in sorted(there)]
        spans = (self._span(number) for number in self._numbers)
        content.prefetch((at, at + size) for at, size in spans if at not in index.sparse)

    def to_baseline(self) -> None:
        """Convert JPEGs of other codings to baseline; leave all else."""
        for number in self._numbers:
            data = open_member(self._content, self._index, self._span(number))
            header = read_header(data, MAX_PIXELS)
            frame = read_jpeg_frame(data) if header.format == "jpeg" else None
            if header.format != "jpeg" or (frame is not None and frame.is_baseline):
                continue
            try:
                if header.error is not None:
                    raise BaselineError(header.error)
                content = to_baseline(self._bytes(number))
                made = read_jpeg_frame(content)
                if made is None or not made.is_baseline:
                    # Tables of 16 bits, which baseline has no room for.
                    raise BaselineError("its tables need more than baseline has")
            except BaselineError as error:
                self.rows[number] = Row(reason=f"not-baseline: {error}")
            else:
                self._replace(number, content, self._member(number)[0], None)

    def encode(self, how: Encode) -> None:
        """Decode images as a read does, and encode them."""
        decoding = how.decoding
        for numbers, headers in self._parts(how):
            nbytes = sum(map(decoding.nbytes, headers))
            pixels = decode(
                headers,
                partial(self._bytes_of, numbers),
                decoding,
                get_backend("pandas").pixel_buffer(nbytes),
                partial(self._origin_of, numbers),
            )
            end = 0
            shapes = pixels.shapes.tolist()
            for number, shape, error in zip(numbers, shapes, pixels.errors, strict=True):
                start, end = end, end + int(np.prod(shape, dtype=np.int64))
                if error is None and max(shape) > _LONGEST_SIDE:
                    error = (
                        f"its {shape[1]} × {shape[0]} pixels are more than the {_LONGEST_SIDE:,} "
                        "on a side that a JPEG can have; pass Encode(size=...)"
                    )
                if error is not None:
                    self.rows[number] = Row(reason=f"bad-image: {error}")
                else:
                    content = _encoded(pixels.flat[start:end].reshape(shape), how)
                    self._replace(number, content, "jpg", (shape[0], shape[1]))

    def _parts(self, how: Encode) -> Iterator[tuple[list[int], list[Header]]]:
        """Batches of images whose pixels are in memory at the same time."""
        numbers: list[int] = []
        headers: list[Header] = []
        nbytes = 0
        for number in self._numbers:
            data = open_member(self._content, self._index, self._span(number))
            header = how.decoding.judged(read_header(data, MAX_PIXELS))
            nbytes += how.decoding.nbytes(header)
            if numbers and nbytes > _PIXELS:
                yield numbers, headers
                numbers, headers, nbytes = [], [], how.decoding.nbytes(header)
            numbers.append(number)
            headers.append(header)
        if numbers:
            yield numbers, headers

    def _replace(
        self, number: int, content: bytes, extension: str, shape: tuple[int, int] | None
    ) -> None:
        """Write an image to the file, in place of the one that a row has."""
        row = self.rows[number]
        members = list(row.members)
        image = row.image or 0
        others = {member[0] for member in members[:image] + members[image + 1 :]}
        if extension in others:
            reason = f"its {members[image][0]} would become a second {extension}"
            self.rows[number] = Row(reason=f"duplicate-member: {reason}")
            return
        members[image] = (extension, EXPANDED, self._file.tell(), len(content))
        self._file.write(content)
        self.rows[number] = row._replace(members=tuple(members), shape=shape)

    def _member(self, number: int) -> tuple[str, int, int, int]:
        row = self.rows[number]
        return row.members[row.image or 0]

    def _span(self, number: int) -> tuple[int, int]:
        return self._member(number)[2:]

    def _bytes(self, number: int) -> bytes:
        return bytes(read_member(self._content, self._index, self._span(number)))

    def _bytes_of(self, numbers: list[int], picture: int) -> bytes:
        return self._bytes(numbers[picture])

    def _origin_of(self, numbers: list[int], picture: int) -> Origin:
        offset = self._member(numbers[picture])[2]
        return Origin(self._url, offset, f"the image at byte {offset}")


def _encoded(pixels: np.ndarray, how: Encode) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **how.settings)
    return file.getvalue()


_PREFIX = f"{STAGING}/made-"

# Of what is written down of each row.
_FORMAT = 2


def is_transcoded(name: str) -> bool:
    """True for staged files that a resumed run reuses although there was no plan yet."""
    return name.startswith(_PREFIX)


def transcoded_name(url: str, version: str, wanted: pa.RecordBatch, options: Options) -> str:
    """Name of the staged file of transcoded images for some rows of a shard."""
    described = options.described()
    decisive = [_FORMAT, url, version, *(described[name] for name in ("jpeg", "members", "index"))]
    digest = hashlib.sha256(json.dumps(decisive).encode())
    digest.update(to_bytes(pa.Table.from_batches([wanted])))
    return f"{_PREFIX}{digest.hexdigest()}"


def save_transcoded(output: OutputStore, name: str, rows: pa.Table, facts: dict[str, Any]) -> None:
    """Save the rows of a source, after the images themselves."""
    told = rows.replace_schema_metadata({"facts": json.dumps(facts)})
    output.put(name, to_bytes(told))


def load_transcoded(output: OutputStore, name: str) -> tuple[pa.Table, dict[str, Any]] | None:
    """Load the rows of an earlier run; None if there are none."""
    content = output.read(name)
    if content is None:
        return None
    rows = from_bytes(content)
    return rows.replace_schema_metadata(None), json.loads(rows.schema.metadata[b"facts"])
