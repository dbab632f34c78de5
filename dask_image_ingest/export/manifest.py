"""Files that describe an export: the plan is written first, the manifest last."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dask_image_ingest.errors import ExportError
from dask_image_ingest.export.options import LEFT_OUT, MANIFEST, PLAN, Options, file_names
from dask_image_ingest.export.plan.shard_plan import ShardPlan
from dask_image_ingest.export.write.shard import done_name, has_recorded_sizes
from dask_image_ingest.storage import OutputStore, identities

#: Of plans and manifests.
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
        """Names of its files, written or planned."""
        if self.plan is None:
            return []
        options = self.plan["options"]
        shards = [
            name
            for number in range(self.plan["shards"])
            for name in file_names(
                options["template"], options["sidecar"], options["index"], number
            )
        ]
        return [MANIFEST, *shards, LEFT_OUT, PLAN]

    def refuse(self) -> None:
        """Say that there is an export already, and what can be done."""
        if self.plan is None:
            return
        raise ExportError(
            f"{self.output.url} has {self._state(self.plan)}. resume=True goes on where it "
            "stopped, overwrite=True removes it first; or choose another folder"
        )

    def refuse_loss(self, new: ShardPlan, left_out: dict[str, Any]) -> None:
        """Refuse to be replaced by a plan that has nothing, or not all that there might be."""
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
        there = self.output.sizes()
        shards = sum(name in there for name in self.files if name.endswith(".tar"))
        return f"an unfinished export, {shards:,} of {plan['shards']:,} shards"

    def is_finished(self) -> bool:
        """True if all files of its manifest are there."""
        if self.manifest is None:
            return False
        there = self.output.sizes()
        told = bool(self.manifest["left_out"]) == (LEFT_OUT in there)
        return told and all(
            has_recorded_sizes(written, there.get) for written in self.manifest["shards"]
        )

    def keep_what_is_there(self) -> None:
        """Turn the manifest of a finished export into records of the shards that are whole."""
        if self.manifest is not None:
            there = self.output.sizes()
            for number, written in enumerate(self.manifest["shards"]):
                if has_recorded_sizes(written, there.get):
                    self.output.put(done_name(number), json.dumps(written).encode())
            self.output.remove([MANIFEST])

    def refuse_other(self, frame: str, options: Options) -> None:
        """Refuse to go on with the export of another frame, or with other options."""
        if self.plan is None:
            return
        before = self.plan["options"]
        told = [
            f"{name} was {before.get(name)!r} and is {value!r} now"
            for name, value in options.described().items()
            if before.get(name) != value
        ]
        if self.plan["frame"] != frame:
            told.append(
                "the frame is another one, since its query, its source shards or the code of its "
                "functions have changed"
            )
        if told:
            raise ExportError(
                f"{self.output.url} has another export: {'; '.join(told)}. overwrite=True removes "
                "it; or choose another folder"
            )

    def refuse_other_plan(self, described: dict[str, Any]) -> None:
        """Refuse to go on if the same frame gives other samples than before."""
        if self.plan is not None and self.plan["plan"] != described["plan"]:
            raise ExportError(
                f"{self.output.url} was planned with {self.plan['samples']:,} samples, and the "
                f"same frame gives other ones now, {described['samples']:,}: its shards have "
                "changed, or a function does not give the same each time. overwrite=True removes "
                "what is there; or choose another folder"
            )

    def remove(self) -> None:
        """Remove what it wrote, and say what that is."""
        there = self.output.sizes()
        files = [name for name in self.files if name in there]
        if files:
            logger.warning(
                "overwrite=True removes %d files of an earlier export from %s: %s",
                len(files),
                self.output.url,
                ", ".join(files[:5]) + (" ..." if len(files) > 5 else ""),
            )
        self.output.remove(files)


def find_previous(output: OutputStore) -> PreviousExport:
    """Look at what is in a place.

    Raises
    ------
    ExportError
        If its plan is none of this package, or of a later release.
    """
    plan, manifest = (
        None if content is None else _parsed(content, output.locate(name))
        for name, content in ((name, output.read(name)) for name in (PLAN, MANIFEST))
    )
    return PreviousExport(output, plan, manifest)


def describe_plan(plan: ShardPlan, options: Options, frame: str) -> dict[str, Any]:
    """A plan as it stands in a place; ``plan`` in it stands for all but the frame's token."""
    described = {
        "format": FORMAT,
        "options": options.described(),
        "samples": len(plan.rows),
        "shards": plan.shards,
        "samples_sha256": plan.samples_digest,
        "sources_sha256": plan.sources_digest,
    }
    text = json.dumps(described, sort_keys=True)
    return {**described, "plan": hashlib.sha256(text.encode()).hexdigest(), "frame": frame}


def refuse_foreign(output: OutputStore, names: Iterable[str], previous: PreviousExport) -> None:
    """Refuse to write over files of others."""
    there = output.sizes()
    ours = set(previous.files)
    foreign = [name for name in names if name in there and name not in ours]
    if foreign:
        raise ExportError(
            f"{output.url} has {len(foreign):,} files which no export wrote and which this one "
            f"would replace, first {foreign[0]}. Move them away, or choose another folder"
        )


def refuse_sources(output: OutputStore, names: Iterable[str], sources: Iterable[str]) -> None:
    """Refuse to write over the shards that are read, or to remove them."""
    written = set().union(*(identities(output.locate(name)) for name in names))
    for source in sorted(sources):
        if not written.isdisjoint(identities(source)):
            raise ExportError(
                f"the frame reads {source}, which this export would write or remove. Choose "
                "another folder"
            )


def _parsed(content: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
        # What may be removed by these names must lie in the place.
        if parsed["format"] == FORMAT and "/" not in parsed.get("options", {}).get("template", ""):
            return dict(parsed)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ExportError(
        f"{where} is not what this release writes there: choose another folder, or move it away"
    )


def result_frame(output: OutputStore, manifest: Mapping[str, Any]) -> pd.DataFrame:
    """A finished export as its caller gets it: a row for each shard, the rest in ``attrs``."""
    shards = manifest["shards"]
    frame = pd.DataFrame(
        {
            "shard": [written["name"] for written in shards],
            "url": [output.locate(written["name"]) for written in shards],
            **{
                name: [written[name] for written in shards]
                for name in ("samples", "members", "bytes", "sha256")
            },
        }
    )
    facts = ("left_out", "damaged", "interleaved", "sources")
    frame.attrs = {"folder": output.url, **{name: manifest[name] for name in facts}}
    return frame
