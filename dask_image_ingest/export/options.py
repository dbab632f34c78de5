"""Options of an export, its context for tasks, and the names of its files."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from dask_image_ingest.export.members import Members
from dask_image_ingest.storage import STAGING, OutputStore

#: Written first: what will be there. And last: what is there.
PLAN, MANIFEST = "_plan.json", "_manifest.json"

#: The rows that could not be written, with reasons.
LEFT_OUT = "_left_out.parquet"


@dataclass(frozen=True, slots=True)
class Options:
    """Options that decide which bytes are written.

    ``has_samples`` says that rows point to samples of shards or to image files; else all members
    are made of columns.
    """

    template: str
    samples_per_shard: int | None
    bytes_per_shard: int | None
    shuffle: int | None
    members: Members
    has_samples: bool
    sidecar: bool
    index: bool
    drop_rows: bool
    drop_bad_images: bool

    def files_of(self, number: int) -> list[str]:
        """The names of a shard and what lies beside it; the shard last, as it is written."""
        return file_names(self.template, self.sidecar, self.index, number)

    def described(self) -> dict[str, Any]:
        """Describe it in JSON, to read and to compare."""
        members = self.members
        described = asdict(self)
        described["members"] = {
            "copied": "all" if members.copied is None else sorted(members.copied),
            "left_out": sorted(members.left_out),
            "made": {made.extension: made.described() for made in members.made},
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
