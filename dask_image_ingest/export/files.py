"""Files of an export: their names, the plan and the manifest, and staged tables.

The plan is written first, the manifest last. Staged tables are Arrow IPC files, written in batches
and read back by row.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from dask_image_ingest.errors import ExportError
from dask_image_ingest.export.members import Members
from dask_image_ingest.storage.output import STAGING, OutputStore, translate_write_errors
from dask_image_ingest.url_secrets import without_secrets

#: The plan is written first, the manifest last.
PLAN, MANIFEST = "_plan.json", "_manifest.json"

#: Rejected rows with reasons.
LEFT_OUT = "_left_out.parquet"

#: Staged table with a batch of rows for each shard to write.
SHARD_ROWS = f"{STAGING}/shard_rows"

#: Format version of plans and manifests.
FORMAT = 2

#: Record of a written shard, as JSON types: names, sizes and digests of its files.
ShardRecord = dict[str, Any]

logger = logging.getLogger("dask_image_ingest")


@dataclass(frozen=True, slots=True)
class Options:
    """Options that determine the written bytes."""

    template: str
    samples_per_shard: int | None
    bytes_per_shard: int | None
    shuffle: int | None
    members: Members
    has_samples: bool  # rows refer to samples or image files; else all members are from columns
    sidecar: bool
    index: bool
    errors: Literal["null", "raise", "drop"]
    row_errors: Literal["raise", "drop"]
    part: tuple[str, ...] = ()  # columns of the part that each image is; else of whole ones

    def refuses(self, reason: str) -> bool:
        """True if the export raises for a row that is rejected for this reason."""
        is_image = reason.startswith("bad-image") and self.errors != "null"
        return (self.errors if is_image else self.row_errors) == "raise"

    def as_json(self) -> dict[str, Any]:
        """The options as JSON types, for the plan and to compare runs."""
        return asdict(self) | {"members": self.members.as_json(), "part": [*self.part]}


@dataclass(frozen=True)
class ExportContext:
    """Settings of an export that its tasks share."""

    output: OutputStore
    options: Options
    url: str  # the folder of the result; not that of ``output`` if it is to replace another export
    source_options: dict[str, Any] | None
    run: str = ""  # id of this run, for `refuse_other_run`


def staged_name(prefix: str) -> str:
    """A new name in the staging folder."""
    return f"{STAGING}/{prefix}-{uuid.uuid4().hex}"


def done_name(number: int) -> str:
    """Name of the record of a written shard, for a run that resumes."""
    return f"{STAGING}/done-{number}.json"


def file_names(template: str, sidecar: bool, index: bool, number: int) -> list[str]:
    """The names of a shard's files in the order they are written: the shard last."""
    shard = template.format(shard=number)
    stem = shard.removesuffix(".tar")
    beside = {f"{stem}.parquet": sidecar, f"{stem}.idx": index}
    return [*(name for name, is_written in beside.items() if is_written), shard]


def has_recorded_sizes(record: ShardRecord, size_of: Callable[[str], int | None]) -> bool:
    """True if a shard and the files beside it have the recorded sizes."""
    return all(size_of(file["name"]) == file["bytes"] for file in (record, *record["beside"]))


@dataclass(frozen=True)
class PreviousExport:
    """An earlier export in the output folder, finished or not."""

    output: OutputStore
    plan: dict[str, Any] | None
    manifest: dict[str, Any] | None

    @property
    def files(self) -> list[str]:
        """Names of its files, whether written yet or not."""
        return [] if self.plan is None else [MANIFEST, *shard_files(self.plan), LEFT_OUT, PLAN]

    def refuse(self) -> None:
        """Raise if there is an earlier export."""
        if self.plan is None:
            return
        raise ExportError(
            f"{self.output.url} has {self._state(self.plan)}. resume=True goes on where it "
            "stopped, overwrite=True removes it first; or choose another folder"
        )

    def refuse_loss(self, samples: int, left_out: Mapping[str, Any]) -> None:
        """Refuse to be replaced by an empty export, or by one that lacks unreadable shards."""
        if self.plan is None:
            return
        has = f"{self.output.url} has {self._state(self.plan)}, which overwrite=True would remove"
        unreadable = left_out.get("unreadable-shard")
        if unreadable:
            raise ExportError(
                f"{has}, and {unreadable['count']:,} rows of the frame point to shards that cannot "
                f"be read now: {unreadable['detail']}. Nothing was removed. Run it again when they "
                "can be read, or filter these rows out; or choose another folder"
            )
        if self.plan["samples"] and not samples:
            raise ExportError(
                f"{has}, and the frame has no row to take its place. Nothing was removed. If that "
                "is meant, remove the folder yourself; or choose another one"
            )

    def _state(self, plan: dict[str, Any]) -> str:
        if self.manifest is not None:
            return f"an export of {plan['samples']:,} samples"
        existing = self.output.sizes()
        shards = sum(name in existing for name in self.files if name.endswith(".tar"))
        return f"an unfinished export, {shards:,} of {plan['shards']:,} shards"

    def differences(self, frame: str, options: Options) -> list[str]:
        """Differences of its frame and options from these, in words."""
        plan = self.plan or {"options": {}, "frame": None}
        before = plan["options"]
        found = [
            f"{name} was {before.get(name)!r} and is {value!r} now"
            for name, value in options.as_json().items()
            if before.get(name) != value
        ]
        if plan["frame"] != frame:
            found.append(
                "the frame is another one, since its query, its source shards or the code of its "
                "functions have changed; a sample() without random_state is another each time, and "
                "persist() leaves no query to compare"
            )
        return found

    def refuse_other(self, frame: str, options: Options) -> None:
        """Refuse to resume the export of another frame, or with other options."""
        differences = self.differences(frame, options) if self.plan is not None else []
        if differences:
            raise ExportError(
                f"{self.output.url} has another export: {'; '.join(differences)}. "
                "overwrite=True replaces it, and goes on with an overwrite=True that was killed; "
                "or choose another folder"
            )

    def refuse_missing_files(self) -> None:
        """Refuse to resume where files are gone that the finished or interrupted run needs."""
        if self.manifest is not None:
            existing = self.output.sizes()
            whole = bool(self.manifest["left_out"]) == (LEFT_OUT in existing) and all(
                has_recorded_sizes(record, existing.get) for record in self.manifest["shards"]
            )
        else:
            whole = self.plan is None or self.output.size(SHARD_ROWS) is not None
        if not whole:
            raise ExportError(
                f"{self.output.url} has an export of which files are missing. overwrite=True "
                "writes it anew; or choose another folder"
            )

    def files_to_remove(self) -> list[str]:
        """Names of those of its files that exist, which are logged."""
        existing = self.output.sizes()
        files = [name for name in self.files if name in existing]
        if files:
            logger.warning(
                "overwrite=True removes %d files of an earlier export from %s: %s",
                len(files),
                self.output.url,
                ", ".join(files[:5]) + (" ..." if len(files) > 5 else ""),
            )
        return files

    def refuse_foreign(self, names: Iterable[str]) -> None:
        """Refuse to overwrite files that no export created."""
        existing = self.output.sizes()
        ours = set(self.files)
        foreign = [name for name in names if name in existing and name not in ours]
        if foreign:
            raise ExportError(
                f"{self.output.url} has {len(foreign):,} files which no export wrote and which "
                f"this one would replace, first {foreign[0]}. Move them away, or choose another "
                "folder"
            )


def find_previous(output: OutputStore) -> PreviousExport:
    """Read the plan and manifest of an earlier export."""
    return PreviousExport(output, _description(output, PLAN), _description(output, MANIFEST))


def _description(output: OutputStore, name: str) -> dict[str, Any] | None:
    content = output.read(name)
    if content is None:
        return None
    try:
        found = json.loads(content)
        # Files are removed by these names: none may lie in another folder.
        if found["format"] == FORMAT and "/" not in found.get("options", {}).get("template", ""):
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ExportError(
        f"{output.locate(name)} is not what this release writes there: choose another folder, or "
        "move it away"
    )


def shard_files(plan: Mapping[str, Any]) -> list[str]:
    """Names of the files of all shards of a plan, as in ``_plan.json``."""
    options = plan["options"]
    return [
        name
        for number in range(plan["shards"])
        for name in file_names(options["template"], options["sidecar"], options["index"], number)
    ]


def result_frame(output: OutputStore, manifest: Mapping[str, Any]) -> pd.DataFrame:
    """The result of `to_webdataset`: a row for each shard, other facts in ``attrs``."""
    columns = ["name", "url", "samples", "members", "bytes", "sha256"]
    records = [{**record, "url": output.locate(record["name"])} for record in manifest["shards"]]
    frame = pd.DataFrame(records, columns=columns).rename(columns={"name": "shard"})
    facts = ("left_out", "damaged", "interleaved", "sources")
    frame.attrs = {
        "folder": without_secrets(output.url),
        **{name: manifest[name] for name in facts},
    }
    return frame


_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


def write_batches(
    output: OutputStore,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.Table],
    compressed: bool = False,
) -> None:
    """Write tables that have rows, each as one batch: the unit of reading."""
    with output.scratch(name) as file:
        options = _COMPRESSED if compressed else None
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch.combine_chunks().to_batches()[0])
        output.commit(file, name)


def read_batch(output: OutputStore, name: str, number: int) -> pa.RecordBatch:
    """Read one batch."""
    with _opened(output, name) as reader:
        return reader.get_batch(number)


def take_rows(output: OutputStore, places: pa.RecordBatch) -> pa.Table | None:
    """Gather rows, given by file (``part``), ``batch`` in it, and ``row`` in that; in this order.

    Each batch is read once. None if no row is in a file (its part is null).
    """
    groups = places.select(["part", "batch"]).to_pandas().groupby(["part", "batch"]).indices
    tables: list[pa.Table] = []
    order: list[np.ndarray] = []
    for part, of_part in groupby(groups.items(), key=lambda group: group[0][0]):
        with _opened(output, part) as reader:
            for (_, batch), numbers in of_part:
                table = pa.Table.from_batches([reader.get_batch(batch)])
                tables.append(table.take(places.column("row").take(pa.array(numbers))))
                order.append(numbers)
    if not tables:
        return None
    whole = pa.concat_tables(tables, promote_options="permissive")
    return whole.take(pa.array(np.argsort(np.concatenate(order)))).combine_chunks()


@contextmanager
def _opened(output: OutputStore, name: str) -> Iterator[pa.ipc.RecordBatchFileReader]:
    with (
        translate_write_errors(output.locate(name), output.advice, done="read"),
        output.open(name) as file,
    ):
        yield pa.ipc.open_file(file)


def table_to_bytes(table: pa.Table) -> bytes:
    """Serialize a table, including its metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table_from_bytes(data: bytes) -> pa.Table:
    """Deserialize a table."""
    return pa.ipc.open_stream(data).read_all()


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file; deterministic."""
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", row_group_size=len(table) or None)
    return sink.getvalue().to_pybytes()
