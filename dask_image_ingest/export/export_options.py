"""Options of an export, its context for tasks, and the names of its files."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dask_image_ingest.export.members import Members
from dask_image_ingest.storage.output import STAGING, OutputStore

#: The plan is written first, the manifest last.
PLAN, MANIFEST = "_plan.json", "_manifest.json"

#: Rejected rows with reasons.
LEFT_OUT = "_left_out.parquet"


@dataclass(frozen=True, slots=True)
class Options:
    """Options that determine the written bytes.

    ``has_samples``: rows refer to samples of shards or to image files; else all members are from
    columns.
    """

    template: str
    samples_per_shard: int | None
    bytes_per_shard: int | None
    shuffle: int | None
    members: Members
    has_samples: bool
    sidecar: bool
    index: bool
    errors: Literal["null", "raise", "drop"]
    row_errors: Literal["raise", "drop"]

    def refuses(self, reason: str) -> bool:
        """True if the export raises for a row that is rejected for this reason."""
        is_image = reason.startswith("bad-image") and self.errors != "null"
        return (self.errors if is_image else self.row_errors) == "raise"

    def as_json(self) -> dict[str, Any]:
        """The options as JSON types, for the plan and to compare runs."""
        members = self.members
        options = asdict(self)
        options["members"] = {
            "copied": "all" if members.copied is None else sorted(members.copied),
            "left_out": sorted(members.left_out),
            "made": {member.extension: member.as_json() for member in members.from_columns},
        }
        return options


@dataclass(frozen=True)
class ExportContext:
    """Settings of an export that its tasks share.

    Attributes
    ----------
    output, options
        Where and what to write.
    url
        The folder of the finished export, which is not that of ``output`` if it is to replace
        another one.
    source_options
        Storage options of the source shards.
    run
        Id of this run, for `refuse_other_run`.
    shard_rows
        Staged table with a batch of rows for each shard to write.
    """

    output: OutputStore
    options: Options
    url: str
    source_options: dict[str, Any] | None
    run: str = ""
    shard_rows: str = ""


def staged_name(prefix: str) -> str:
    """A new name in the staging folder."""
    return f"{STAGING}/{prefix}-{uuid.uuid4().hex}"


def file_names(template: str, sidecar: bool, index: bool, number: int) -> list[str]:
    """The names of a shard's files in the order they are written: the shard last."""
    shard = template.format(shard=number)
    stem = shard.removesuffix(".tar")
    return [*[f"{stem}.parquet"] * sidecar, *[f"{stem}.idx"] * index, shard]
