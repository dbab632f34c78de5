"""The steps of an export: lock, stage the frame, plan, write shards, write the manifest."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from dask_image_ingest.computing import run
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export.manifest import (
    FORMAT,
    PreviousExport,
    describe_plan,
    find_previous,
    refuse_foreign,
    refuse_sources,
    result_frame,
)
from dask_image_ingest.export.options import (
    LEFT_OUT,
    MANIFEST,
    PLAN,
    ExportContext,
    Options,
    staged_name,
)
from dask_image_ingest.export.plan.planner import Prepared, prepare
from dask_image_ingest.export.plan.rejected_rows import assigns_keys
from dask_image_ingest.export.plan.staging import StagedRows, metadata_columns, stage_frame
from dask_image_ingest.export.query import frame_fingerprint, shards_read
from dask_image_ingest.export.write.shard import write_shard
from dask_image_ingest.index import parquet_bytes
from dask_image_ingest.storage import (
    RUN,
    STAGING,
    LocalStore,
    OutputStore,
    acquire,
    begin_run,
    refuse_other_run,
)

# What is known of an export besides its plan, for whoever goes on.
_FACTS = f"{STAGING}/facts.json"
_LEFT_OUT = f"{STAGING}/left_out.parquet"


def export(
    frame: Any,
    output: OutputStore,
    options: Options,
    *,
    resume: bool,
    overwrite: bool,
    source_options: dict[str, Any] | None,
    show: bool,
) -> pd.DataFrame:
    """Write a frame's samples to a place as shards, whole or not at all."""
    if resume and overwrite:
        raise ArgumentError(
            "resume=True goes on with what is there and overwrite=True removes it: choose one"
        )
    context = ExportContext(output, options, source_options)
    is_new = isinstance(output, LocalStore) and not os.path.exists(output.url)
    try:
        with acquire(output, steal=resume or overwrite) as check_lock:
            previous = find_previous(output)
            if not resume and not overwrite:
                previous.refuse()
            return _Run(frame, context, previous, check_lock, resume, show).run()
    finally:
        if is_new:
            with suppress(OSError):  # something is in it
                os.rmdir(output.url)


class _Run:
    """A run of an export: new, or resumed."""

    def __init__(
        self,
        frame: Any,
        context: ExportContext,
        previous: PreviousExport,
        check_lock: Callable[[], None],
        resume: bool,
        show: bool,
    ) -> None:
        self.frame = frame
        self.context = context
        self.output = context.output
        self.previous = previous
        self.check_lock = check_lock
        self.resume = resume
        self.show = show
        self.columns = metadata_columns(frame)
        needed = dict.fromkeys([*self.columns, *context.options.members.columns])
        told = [name for name in needed if name in frame.columns]
        self.token = frame_fingerprint(frame, told, context.source_options)

    def run(self) -> pd.DataFrame:
        """Plan what is not planned, write what is not written."""
        if self.resume:
            self.previous.refuse_other(self.token, self.context.options)
            if self.previous.is_finished():
                self.output.remove_staging()
                return result_frame(self.output, self.previous.manifest or {})
        facts = self._facts_of_earlier() or self._plan()
        context = replace(self.context, planned=facts["planned"], run=self._begin_run())
        self._put_left_out(facts["left_out"])
        shards = run(partial(write_shard, context=context), range(facts["shards"]), self.show)
        refuse_other_run(self.output, context.run)
        self.check_lock()
        manifest = {
            "format": FORMAT,
            "plan": facts["plan"],
            "samples": sum(written["samples"] for written in shards),
            **facts["told"],
            "shards": shards,
        }
        self.output.put(MANIFEST, json.dumps(manifest, indent=1).encode())
        self.output.fsync()
        self.output.remove_staging()
        return result_frame(self.output, manifest)

    def _facts_of_earlier(self) -> dict[str, Any] | None:
        """Facts of a run that was killed while it wrote shards; None if there was none."""
        if self.previous.plan is None:
            self.output.remove_staging()
            return None
        staged = self.output.sizes(STAGING)
        self.output.remove(f"{STAGING}/{name}" for name in staged if name.endswith(".tmp"))
        facts = json.loads(self.output.read(_FACTS) or b"{}")
        same = self.resume and facts.get("plan") == self.previous.plan["plan"]
        return facts if same else None

    def _plan(self) -> dict[str, Any]:
        """Find out what is to be written, and begin."""
        read = shards_read(self.frame)
        refuse_sources(self.output, self.previous.files, read)
        before = self._staged()
        context = replace(
            self.context, pointers=staged_name("pointers"), planned=staged_name("planned")
        )
        try:
            staged = stage_frame(self.frame, context, self.columns, self.show)
            prepared = prepare(staged, context, assigns_keys(self.frame), self.show)
            if not self.resume:
                self.previous.refuse_loss(prepared.plan, prepared.rejected.summary())
            described = self._accepted(staged, prepared, read)
        except BaseException:
            self.check_lock()  # else what is staged may be another run's
            self.output.remove(set(self._staged()) - set(before))
            if not self._staged():
                self.output.remove_staging()
            raise
        going_on = self.resume and self.previous.plan is not None
        # From here on tasks of an earlier run write nothing: else they would restore removed files.
        self._begin_run()
        if going_on:
            self.previous.keep_what_is_there()
        else:
            self.previous.remove()
            self.output.remove(name for name in before if name != RUN)
            self._begin(described)
        plan = prepared.plan
        left_out = prepared.rejected.table()
        if len(left_out):
            self.output.put(_LEFT_OUT, parquet_bytes(left_out))
        facts = {
            "plan": described["plan"],
            "planned": context.planned,
            "left_out": len(left_out),
            "shards": plan.shards,
            "told": {
                "left_out": prepared.rejected.summary(),
                "damaged": {s.url: s.damage for s in plan.sources if s.damage},
                "interleaved": sum(source.interleaved for source in plan.sources),
                "sources": [source.url for source in plan.sources if source.url],
            },
        }
        self.output.put(_FACTS, json.dumps(facts).encode())
        return facts

    def _accepted(self, staged: StagedRows, prepared: Prepared, read: set[str]) -> dict[str, Any]:
        """A plan in words, if it may be carried out here."""
        plan, options = prepared.plan, self.context.options
        described = describe_plan(plan, options, self.token)
        if self.resume:
            self.previous.refuse_other_plan(described)
        files = [name for number in range(plan.shards) for name in options.files_of(number)]
        twice = [name for name, count in Counter(files).items() if count > 1]
        if twice:
            raise ArgumentError(
                f"{options.template!r} gives {plan.shards:,} shards the same names, {twice[0]!r} "
                "among them: number them in full, as 'out/{shard:06d}.tar' does"
            )
        refuse_foreign(self.output, [*files, LEFT_OUT], self.previous)
        # Of what was computed before, only rows tell what it reads: those that are left out too.
        of_rows = staged.rows.column("url").combine_chunks().dictionary.to_pylist()
        refuse_sources(
            self.output, [*files, *self.previous.files], read.union(filter(None, of_rows))
        )
        return described

    def _begin(self, described: dict[str, Any]) -> None:
        if not self.output.create(PLAN, json.dumps(described, indent=1).encode()):
            raise ExportError(f"another export began in {self.output.url} just now")

    def _begin_run(self) -> str:
        self.check_lock()
        run = begin_run(self.output)
        self.check_lock()
        return run

    def _put_left_out(self, count: int) -> None:
        """Write the table of the rows that are left out, or remove that of a run before."""
        table = self.output.read(_LEFT_OUT) if count else None
        if table is None:
            self.output.remove([LEFT_OUT])
        else:
            self.output.put(LEFT_OUT, table)

    def _staged(self) -> list[str]:
        return [f"{STAGING}/{name}" for name in self.output.sizes(STAGING)]
