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
from dask_image_ingest.errors import ArgumentError, DaskImageIngestError, ExportError
from dask_image_ingest.export.export_options import (
    LEFT_OUT,
    MANIFEST,
    PLAN,
    ExportContext,
    staged_name,
)
from dask_image_ingest.export.manifest import (
    FORMAT,
    PreviousExport,
    describe_plan,
    find_previous,
    refuse_foreign,
    result_frame,
    shard_files,
)
from dask_image_ingest.export.plan.shard_plan import ShardPlan, make_plan
from dask_image_ingest.export.plan.staging import StagedRows, stage_frame
from dask_image_ingest.export.query import (
    assigns_keys,
    frame_fingerprint,
    shards_read,
    unstable_steps,
)
from dask_image_ingest.export.write_shards import write_shard
from dask_image_ingest.index import parquet_bytes
from dask_image_ingest.storage.output import (
    REPLACEMENT,
    REPLACING,
    RUN,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    parsed,
    refuse_other_run,
    refuse_sources,
    replacement_of,
    swap,
)
from dask_image_ingest.url_secrets import url_identity

# Facts about a planned export, for a run that resumes it.
_FACTS = f"{STAGING}/facts.json"
_LEFT_OUT = f"{STAGING}/left_out.parquet"


def export(
    frame: Any, columns: Sequence[str], context: ExportContext, *, resume: bool, overwrite: bool
) -> pd.DataFrame:
    """Write a frame's samples as shards; see `to_webdataset`."""
    output = context.output
    if resume and overwrite:
        raise ArgumentError(
            "resume=True goes on with what is there and overwrite=True removes it: choose one"
        )
    with acquire(output, steal=resume or overwrite) as check_lock:
        previous = find_previous(output)
        if not resume and not overwrite:
            previous.refuse()
        needed = dict.fromkeys([*columns, *context.options.members.columns])
        token = frame_fingerprint(frame, [name for name in needed if name in frame.columns])
        here = _Run(frame, columns, token, context, previous, previous, check_lock, resume)
        if previous.plan is None:
            return here.run()
        if overwrite:
            output.put(REPLACING, here.mark)
        # Replaces the earlier export when it is whole.
        apart = replacement_of(output)
        there = replace(here, context=replace(context, output=apart), previous=find_previous(apart))
        if output.read(REPLACING) != here.mark:
            return (there if there.is_of_this_frame() else here).run()
        # Also where a run with overwrite=True was killed before it had a plan.
        there = replace(there, resume=resume and there.is_of_this_call())
        try:
            return there.run()
        except DaskImageIngestError as error:
            if error.__cause__ is None:  # refused: there is nothing to go on with
                check_lock()
                output.remove([REPLACING])
                output.remove_empty_staging()
            raise


@dataclass
class _Run:
    """A run of an export: new, or resumed.

    ``columns`` are those of its sidecars, ``token`` is the frame's fingerprint. ``previous`` is
    what it finds where it writes, ``target`` what is in the folder of the result, and is replaced
    if that is another one.
    """

    frame: Any
    columns: Sequence[str]
    token: str
    context: ExportContext
    previous: PreviousExport
    target: PreviousExport
    check_lock: Callable[[], None]
    resume: bool

    @property
    def output(self) -> OutputStore:
        """The folder where it writes."""
        return self.context.output

    def run(self) -> pd.DataFrame:
        """Plan the export and write its shards, except what an earlier run has done."""
        if self.resume:
            unstable = unstable_steps(self.frame)
            self.previous.refuse_other(self.token, self.context.options, unstable)
            if self.previous.is_finished():
                return self._finish(self.previous.manifest or {})
        facts = self._facts_to_resume() or self._plan_anew()
        context = replace(self.context, shard_rows=facts["shard_rows"], run=self._begin_run())
        self._put_left_out(facts["left_out"])
        shards = one_task_per_item(partial(write_shard, context=context), range(facts["shards"]))
        refuse_other_run(self.output, context.run)
        self.check_lock()
        manifest = {
            "format": FORMAT,
            "plan": facts["digest"],
            "samples": sum(written["samples"] for written in shards),
            **facts["attrs"],
            "shards": shards,
        }
        self.output.put(MANIFEST, json.dumps(manifest, indent=1).encode())
        self.output.fsync()
        return self._finish(manifest)

    @property
    def mark(self) -> bytes:
        """Frame and options, which tell this call from others that replace the same export."""
        call = {"frame": self.token, "options": self.context.options.as_json()}
        return json.dumps(call, sort_keys=True).encode()

    def is_of_this_call(self) -> bool:
        """True if an earlier run has begun the same export."""
        return self.is_of_this_frame() and not self.previous.differences(self.context.options)

    def is_of_this_frame(self) -> bool:
        """True if an earlier run has begun the export of the same frame."""
        return self.previous.plan is not None and self.previous.plan["frame"] == self.token

    def _finish(self, manifest: dict[str, Any]) -> pd.DataFrame:
        """Replace an earlier export by the complete one; the result."""
        target = self.target.output
        if self.output != target:
            whole = find_previous(self.output)
            existing = self.output.sizes()
            names = [*(name for name in whole.files[1:] if name in existing), MANIFEST]
            self.check_lock()
            swap(target, {f"{REPLACEMENT}/{n}": n for n in names}, self.target.files_to_remove())
        target.remove_staging()
        return result_frame(target, manifest)

    def _facts_to_resume(self) -> dict[str, Any] | None:
        """Facts of a run that was killed while it wrote shards; None to plan anew."""
        if self.previous.plan is None:
            self.output.remove_staging()
            return None
        staged = self.output.sizes(STAGING)
        self.output.remove(f"{STAGING}/{name}" for name in staged if name.endswith(".tmp"))
        facts = parsed(self.output.read(_FACTS))
        same = self.resume and facts.get("digest") == self.previous.plan["plan"]
        return facts if same else None

    def _plan_anew(self) -> dict[str, Any]:
        """Plan the export, and take over the folder: write the plan, remove an earlier export."""
        # Those of a computed frame are known when its rows are.
        read = files_read(self.frame) if isinstance(self.frame, FrameBase) else set()
        searched = searches_of_frame(self.frame)
        files = map(self.target.output.locate, self.target.files)
        refuse_sources(read, files, "export", searches=searched)
        staged_before = self._staged()
        context = replace(self.context, shard_rows=staged_name("shard_rows"))
        try:
            staged = stage_frame(self.frame, context, self.columns)
            plan, rejected = make_plan(
                staged, context, shards_read(self.frame), assigns_keys(self.frame)
            )
            if not self.resume:
                self.target.refuse_loss(plan, rejected.summary())
            description = self._describe_accepted(staged, plan, read)
        except BaseException:
            self.check_lock()  # without it, staged files may be another run's
            self.output.remove(set(self._staged()) - set(staged_before))
            if not self._staged():
                self.output.remove_staging()
            raise
        is_resumed = self.resume and self.previous.plan is not None
        # From here on tasks of an earlier run commit nothing: they would restore removed files.
        self._begin_run()
        if is_resumed:
            self.previous.keep_finished_shards()
        else:
            self.output.remove(self.previous.files)
            self.output.remove(name for name in staged_before if name != RUN)
            self._write_plan(description)
        left_out = rejected.table()
        if len(left_out):
            self.output.put(_LEFT_OUT, parquet_bytes(left_out))
        facts = {
            "digest": description["plan"],
            "shard_rows": context.shard_rows,
            "left_out": len(left_out),
            "shards": plan.shards,
            "attrs": {
                "left_out": rejected.summary(),
                "damaged": {url_identity(s.url): s.damage for s in plan.sources if s.damage},
                "interleaved": sum(source.interleaved for source in plan.sources),
                "sources": [url_identity(source.url) for source in plan.sources if source.url],
            },
        }
        self.output.put(_FACTS, json.dumps(facts).encode())
        return facts

    def _describe_accepted(
        self, staged: StagedRows, plan: ShardPlan, read: set[str]
    ) -> dict[str, Any]:
        """The plan for ``_plan.json``, after checks that it may be executed in this folder."""
        options = self.context.options
        description = describe_plan(plan, options, self.token)
        if self.resume:
            self.previous.refuse_other_plan(description)
        files = shard_files(description)
        twice = [name for name, count in Counter(files).items() if count > 1]
        if twice:
            raise ArgumentError(
                f"{options.template!r} gives {plan.shards:,} shards the same names, {twice[0]!r} "
                "among them: number them in full, as 'out/{shard:06d}.tar' does"
            )
        files.append(LEFT_OUT)
        refuse_foreign(files, self.target)
        # Sources of a computed frame are known by its rows only, rejected ones included.
        row_urls = staged.rows.column("url").combine_chunks().dictionary.to_pylist()
        read = read.union(filter(None, row_urls))
        written = map(self.target.output.locate, [*files, *self.target.files])
        refuse_sources(read, written, "export", searches=searches_of_frame(self.frame))
        return description

    def _write_plan(self, description: dict[str, Any]) -> None:
        if not self.output.create(PLAN, json.dumps(description, indent=1).encode()):
            raise ExportError(f"another export began in {self.output.url} just now")

    def _begin_run(self) -> str:
        self.check_lock()
        begin_run(self.target.output)
        run = begin_run(self.output)
        self.check_lock()
        return run

    def _put_left_out(self, count: int) -> None:
        """Write the table of rejected rows, or remove that of an earlier run."""
        table = self.output.read(_LEFT_OUT) if count else None
        if table is None:
            self.output.remove([LEFT_OUT])
        else:
            self.output.put(LEFT_OUT, table)

    def _staged(self) -> list[str]:
        return [f"{STAGING}/{name}" for name in self.output.sizes(STAGING)]
