"""Files that describe an export: the plan is written first, the manifest last."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dask_image_ingest.errors import ExportError
from dask_image_ingest.export.export_options import LEFT_OUT, MANIFEST, PLAN, Options, file_names
from dask_image_ingest.export.plan.shard_plan import ShardPlan
from dask_image_ingest.export.write_shards import done_name, has_recorded_sizes
from dask_image_ingest.storage.output import OutputStore
from dask_image_ingest.url_secrets import without_secrets

#: Format version of plans and manifests.
FORMAT = 1

logger = logging.getLogger("dask_image_ingest")


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

    def refuse_loss(self, new: ShardPlan, left_out: dict[str, Any]) -> None:
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
        if self.plan["samples"] and not len(new.rows):
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

    def is_finished(self) -> bool:
        """True if all files of its manifest exist, with the recorded sizes."""
        if self.manifest is None:
            return False
        existing = self.output.sizes()
        has_left_out = bool(self.manifest["left_out"]) == (LEFT_OUT in existing)
        return has_left_out and all(
            has_recorded_sizes(record, existing.get) for record in self.manifest["shards"]
        )

    def keep_finished_shards(self) -> None:
        """Replace the manifest by records of the complete shards, so that others are rewritten."""
        if self.manifest is not None:
            existing = self.output.sizes()
            for number, record in enumerate(self.manifest["shards"]):
                if has_recorded_sizes(record, existing.get):
                    self.output.put(done_name(number), json.dumps(record).encode())
            self.output.remove([MANIFEST])

    def differences(self, options: Options) -> list[str]:
        """Differences of its plan's options from these, in words."""
        before = (self.plan or {}).get("options", {})
        return [
            f"{name} was {before.get(name)!r} and is {value!r} now"
            for name, value in options.as_json().items()
            if before.get(name) != value
        ]

    def refuse_other(self, frame: str, options: Options, unstable: Sequence[str]) -> None:
        """Refuse to resume the export of another frame, or with other options.

        ``unstable``: why the fingerprint of the same frame may differ, in words.
        """
        if self.plan is None:
            return
        differences = self.differences(options)
        if self.plan["frame"] != frame:
            another = "the frame is another one, since its query, its source shards or the code of "
            differences.append("; ".join([f"{another}its functions have changed", *unstable]))
        if differences:
            raise ExportError(
                f"{self.output.url} has another export: {'; '.join(differences)}. overwrite=True "
                "removes it; or choose another folder"
            )

    def refuse_other_plan(self, description: dict[str, Any]) -> None:
        """Refuse to resume if the same frame gives other samples than before."""
        if self.plan is not None and self.plan["plan"] != description["plan"]:
            raise ExportError(
                f"{self.output.url} was planned with {self.plan['samples']:,} samples, and the "
                f"same frame gives other ones now, {description['samples']:,}: its shards have "
                "changed, or a function does not give the same each time. overwrite=True removes "
                "what is there; or choose another folder"
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


def find_previous(output: OutputStore) -> PreviousExport:
    """Read the plan and manifest of an earlier export.

    Raises
    ------
    ExportError
        If they are not of this package, or of another format version.
    """
    plan, manifest = (
        None if content is None else _parsed(content, output.locate(name))
        for name, content in ((name, output.read(name)) for name in (PLAN, MANIFEST))
    )
    return PreviousExport(output, plan, manifest)


def describe_plan(plan: ShardPlan, options: Options, frame: str) -> dict[str, Any]:
    """Content of ``_plan.json``; ``plan`` is a digest of everything but the frame's token."""
    description = {
        "format": FORMAT,
        "options": options.as_json(),
        "samples": len(plan.rows),
        "shards": plan.shards,
        "samples_sha256": plan.samples_digest,
        "sources_sha256": plan.sources_digest,
    }
    text = json.dumps(description, sort_keys=True)
    return {**description, "plan": hashlib.sha256(text.encode()).hexdigest(), "frame": frame}


def shard_files(plan: Mapping[str, Any]) -> list[str]:
    """Names of the files of all shards of a plan, as in ``_plan.json``."""
    options = plan["options"]
    return [
        name
        for number in range(plan["shards"])
        for name in file_names(options["template"], options["sidecar"], options["index"], number)
    ]


def refuse_foreign(names: Iterable[str], previous: PreviousExport) -> None:
    """Refuse to overwrite files that no export created."""
    output = previous.output
    existing = output.sizes()
    ours = set(previous.files)
    foreign = [name for name in names if name in existing and name not in ours]
    if foreign:
        raise ExportError(
            f"{output.url} has {len(foreign):,} files which no export wrote and which this one "
            f"would replace, first {foreign[0]}. Move them away, or choose another folder"
        )


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
        # Files are removed by these names: none may lie in another folder.
        if found["format"] == FORMAT and "/" not in found.get("options", {}).get("template", ""):
            return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ExportError(
        f"{where} is not what this release writes there: choose another folder, or move it away"
    )


def result_frame(output: OutputStore, manifest: Mapping[str, Any]) -> pd.DataFrame:
    """The result of `to_webdataset`: a row for each shard, other facts in ``attrs``."""
    shards = manifest["shards"]
    frame = pd.DataFrame(
        {
            "shard": [record["name"] for record in shards],
            "url": [output.locate(record["name"]) for record in shards],
            **{
                name: [record[name] for record in shards]
                for name in ("samples", "members", "bytes", "sha256")
            },
        }
    )
    facts = ("left_out", "damaged", "interleaved", "sources")
    frame.attrs = {
        "folder": without_secrets(output.url),
        **{name: manifest[name] for name in facts},
    }
    return frame
