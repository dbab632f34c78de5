"""The steps of an export: lock, stage the frame, plan, write shards, write the manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export.manifest import (
    FORMAT,
    LEFT_OUT,
    MANIFEST,
    PLAN,
    ExportContext,
    PreviousExport,
    file_names,
    find_previous,
    result_frame,
    shard_files,
)
from dask_image_ingest.export.query import frame_fingerprint, shards_read, unstable_steps
from dask_image_ingest.export.shard_plan import ShardPlan, make_plan
from dask_image_ingest.export.staging import stage_frame
from dask_image_ingest.export.write_shards import write_shard
from dask_image_ingest.index import parquet_bytes
from dask_image_ingest.storage.output import (
    REPLACEMENT,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    refuse_other_run,
    refuse_sources,
    replacement_of,
    swap,
)
from dask_image_ingest.url_secrets import url_identity

# The rejected rows, until the plan is written: before it, the folder holds no file of an export.
_STAGED_LEFT_OUT = f"{STAGING}/left_out.parquet"


def export(
    frame: Any, columns: Sequence[str], context: ExportContext, *, resume: bool, overwrite: bool
) -> pd.DataFrame:
    """Write a frame's samples as shards; see `to_webdataset`."""
    if resume and overwrite:
        raise ArgumentError(
            "resume=True goes on with what is there and overwrite=True removes it: choose one"
        )
    with acquire(context.output, steal=resume or overwrite) as check_lock:
        target = find_previous(context.output)
        if not resume and not overwrite:
            target.refuse()
        needed = dict.fromkeys([*columns, *context.options.members.columns])
        token = frame_fingerprint(frame, [name for name in needed if name in frame.columns])
        if overwrite and target.plan is not None:
            # Written apart, and moved when it is whole; a killed run of the same call goes on.
            context = replace(context, output=replacement_of(context.output))
            previous = find_previous(context.output)
            if previous.plan is not None and previous.differences(token, context.options):
                context.output.remove(previous.files)
                previous = find_previous(context.output)
        else:
            previous = target
            previous.refuse_other(token, context.options, unstable_steps(frame))
            previous.refuse_missing_files()
        return _Run(frame, columns, token, context, previous, target, check_lock).run()


@dataclass
class _Run:
    """A run of an export: new, or resumed.

    ``columns`` are those of its sidecars, ``token`` is the frame's fingerprint. ``previous`` is
    what it goes on with where it writes, ``target`` what is in the folder of the result, and is
    replaced if that is another one.
    """

    frame: Any
    columns: Sequence[str]
    token: str
    context: ExportContext
    previous: PreviousExport
    target: PreviousExport
    check_lock: Callable[[], None]

    @property
    def output(self) -> OutputStore:
        """The folder where it writes."""
        return self.context.output

    def run(self) -> pd.DataFrame:
        """Plan the export and write its shards, except what an earlier run has done."""
        manifest = self.previous.manifest
        if manifest is None:
            manifest = self._write(self.previous.plan or self._plan())
        target = self.target.output
        if self.output != target:  # replace the earlier export, now that this one is whole
            existing = self.output.sizes()
            files = [*find_previous(self.output).files[1:], MANIFEST]
            new = {f"{REPLACEMENT}/{name}": name for name in files if name in existing}
            self.check_lock()
            swap(target, new, self.target.files_to_remove())
        target.remove_staging()
        return result_frame(target, manifest)

    def _write(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the shards of a plan that are not there yet, and the manifest."""
        context = replace(self.context, run=self._begin_run())
        shards = one_task_per_item(partial(write_shard, context=context), range(plan["shards"]))
        refuse_other_run(self.output, context.run)
        self.check_lock()
        left_out = self.output.read(_STAGED_LEFT_OUT)
        if left_out is not None:
            self.output.put(LEFT_OUT, left_out)
        samples = sum(record["samples"] for record in shards)
        manifest = {"format": FORMAT, "samples": samples, **plan["attrs"], "shards": shards}
        self.output.put(MANIFEST, json.dumps(manifest, indent=1).encode())
        self.output.fsync()
        return manifest

    def _plan(self) -> dict[str, Any]:
        """Plan the export, and take over the folder: write the plan, as in ``_plan.json``."""
        self.output.remove_staging()
        try:
            options = self.context.options
            first = file_names(options.template, options.sidecar, options.index, 0)
            self._refuse_sources([*first, *self.target.files])
            staged = stage_frame(self.frame, self.context, self.columns)
            plan, rejected = make_plan(staged, self.context, shards_read(self.frame))
            left_out = rejected.summary()
            description = self._describe(plan, left_out)
            # Sources of a computed frame are known by its rows only, rejected ones included.
            urls = staged.rows.column("url").combine_chunks().dictionary.to_pylist()
            self._refuse_files(description, urls)
            self.target.refuse_loss(len(plan.rows), left_out)
        except BaseException:
            self.check_lock()  # without it, staged files may be another run's
            self.output.remove_staging()
            self.target.output.remove_empty_staging()
            raise
        # From here on tasks of an earlier run commit nothing: they would restore removed files.
        self._begin_run()
        plan.write(self.output, staged.schema)
        if left_out:
            self.output.put(_STAGED_LEFT_OUT, parquet_bytes(rejected.table()))
        if not self.output.create(PLAN, json.dumps(description, indent=1).encode()):
            raise ExportError(f"another export began in {self.output.url} just now")
        return description

    def _describe(self, plan: ShardPlan, left_out: dict[str, Any]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "options": self.context.options.as_json(),
            "samples": len(plan.rows),
            "shards": plan.shards,
            "frame": self.token,
            "attrs": {
                "left_out": left_out,
                "damaged": {url_identity(s.url): s.damage for s in plan.sources if s.damage},
                "interleaved": sum(source.interleaved for source in plan.sources),
                "sources": [url_identity(source.url) for source in plan.sources if source.url],
            },
        }

    def _refuse_files(self, plan: dict[str, Any], urls: Sequence[str | None]) -> None:
        """Refuse a plan whose files are of equal names, others' files, or among the sources."""
        files = shard_files(plan)
        twice = [name for name, count in Counter(files).items() if count > 1]
        if twice:
            raise ArgumentError(
                f"{plan['options']['template']!r} gives {plan['shards']:,} shards the same names, "
                f"{twice[0]!r} among them: number them in full, as 'out/{{shard:06d}}.tar' does"
            )
        files.append(LEFT_OUT)
        self.target.refuse_foreign(files)
        self._refuse_sources([*files, *self.target.files], urls)

    def _refuse_sources(self, files: Sequence[str], urls: Sequence[str | None] = ()) -> None:
        """Refuse to write or remove files that the frame reads, or that its rows are from."""
        sources = set(filter(None, urls))
        if isinstance(self.frame, FrameBase):
            sources |= files_read(self.frame)
        written = map(self.target.output.locate, files)
        refuse_sources(sources, written, "export", searches=searches_of_frame(self.frame))

    def _begin_run(self) -> str:
        self.check_lock()
        begin_run(self.target.output)
        run = begin_run(self.output)
        self.check_lock()
        return run
