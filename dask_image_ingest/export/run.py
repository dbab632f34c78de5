"""An export from beginning to end: one writer, a plan, shards, a manifest."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export.commit import (
    FORMAT,
    Earlier,
    describe_plan,
    find_earlier,
    refuse_foreign,
    refuse_sources,
)
from dask_image_ingest.export.exported import Exported
from dask_image_ingest.export.frame_token import frame_token
from dask_image_ingest.export.job import LEFT_OUT, MANIFEST, PLAN, Job, Options, staged_name
from dask_image_ingest.export.kept import is_kept
from dask_image_ingest.export.keys import assigns_keys
from dask_image_ingest.export.local_place import LocalPlace
from dask_image_ingest.export.lock import RUN, begin_run, hold, refuse_other_run
from dask_image_ingest.export.place import STAGING, Place
from dask_image_ingest.export.prepare import Prepared, prepare
from dask_image_ingest.export.shard import compare_shard, write_shard
from dask_image_ingest.export.sidecar import table_bytes
from dask_image_ingest.export.sources import shards_read
from dask_image_ingest.export.stage import Staged, metadata_columns, stage
from dask_image_ingest.progress import run

__all__ = ["export"]

# What is known of an export besides its plan, for whoever goes on.
_FACTS = f"{STAGING}/facts.json"
_LEFT_OUT = f"{STAGING}/left_out.parquet"


def export(
    frame: Any,
    place: Place,
    options: Options,
    *,
    resume: bool,
    overwrite: bool,
    source_options: dict[str, Any] | None,
    show: bool,
) -> Exported:
    """Write a frame's samples to a place as shards, whole or not at all."""
    if resume and overwrite:
        raise ArgumentError(
            "resume=True goes on with what is there and overwrite=True removes it: choose one"
        )
    job = Job(place, options, source_options)
    is_new = isinstance(place, LocalPlace) and not os.path.exists(place.url)
    try:
        with hold(place, take_over=resume or overwrite) as check_lock:
            earlier = find_earlier(place)
            if not resume and not overwrite:
                earlier.refuse()
            return _Run(frame, job, earlier, check_lock, resume, show).run()
    finally:
        if is_new:
            with suppress(OSError):  # something is in it
                os.rmdir(place.url)


class _Run:
    """One attempt to bring an export to its end."""

    def __init__(
        self,
        frame: Any,
        job: Job,
        earlier: Earlier,
        check_lock: Callable[[], None],
        resume: bool,
        show: bool,
    ) -> None:
        self.frame = frame
        self.job = job
        self.place = job.place
        self.earlier = earlier
        self.check_lock = check_lock
        self.resume = resume
        self.show = show
        self.columns = metadata_columns(frame)
        pixels = [name for made in job.options.members.pixels for name in made.needs]
        told = [name for name in [*self.columns, *pixels] if name in frame.columns]
        self.token = frame_token(frame, told, job.source_options)

    def run(self) -> Exported:
        """Plan what is not planned, write what is not written."""
        if self._is_finished():
            self.place.remove_staging()
            return self._exported(self.earlier.manifest or {})
        facts = self._facts_of_earlier() or self._plan()
        numbers = range(facts["shards"])
        job = replace(self.job, planned=facts["planned"], run=self._begin_run())
        if facts["check_columns"]:
            run(partial(compare_shard, job=job), numbers, self.show)
        self._put_left_out(facts["left_out"])
        shards = run(partial(write_shard, job=job), numbers, self.show)
        refuse_other_run(self.place, job.run)
        self.check_lock()
        manifest = {
            "format": FORMAT,
            "plan": facts["plan"],
            "samples": sum(written["samples"] for written in shards),
            **facts["told"],
            "shards": shards,
        }
        self._sign()
        self.place.put(MANIFEST, json.dumps(manifest, indent=1).encode())
        self.place.settle()
        self.place.remove_staging()
        return self._exported(manifest)

    def _is_finished(self) -> bool:
        """Whether the earlier export was of this frame, with these options, and is complete."""
        plan = self.earlier.plan
        if plan is None or not self._is_same(plan["frame"]):
            return False
        return self.earlier.is_finished()

    def _is_same(self, frame: str | None) -> bool:
        """Whether an export of a frame with this token, planned as the earlier one, goes on."""
        options = (self.earlier.plan or {}).get("options")
        known = self.token is not None and frame == self.token
        return self.resume and known and options == self.job.options.described()

    def _facts_of_earlier(self) -> dict[str, Any] | None:
        """What a run that was killed while it wrote shards knew; None if there is no such thing."""
        if self.earlier.plan is None:
            if self.resume:
                self.place.remove(name for name in self._staged() if not is_kept(name))
            else:
                self.place.remove_staging()
            return None
        staged = self.place.sizes(STAGING)
        self.place.remove(f"{STAGING}/{name}" for name in staged if name.endswith(".tmp"))
        facts = json.loads(self.place.read(_FACTS) or b"{}")
        same = self._is_same(facts.get("frame")) and facts["plan"] == self.earlier.plan["plan"]
        return facts if same else None

    def _plan(self) -> dict[str, Any]:
        """Find out what is to be written, and begin."""
        read = shards_read(self.frame)
        refuse_sources(self.place, self.earlier.files, read)
        before = self._staged()
        job = replace(self.job, pointers=staged_name("pointers"), planned=staged_name("planned"))
        refused = False
        try:
            staged = stage(self.frame, job, self.columns, self.show)
            prepared = prepare(staged, job, assigns_keys(self.frame), self.show)
            if not self.resume:
                self.earlier.refuse_loss(prepared.plan, prepared.reasons.summary())
            refused = True
            described = self._accepted(staged, prepared, read)
        except BaseException as error:
            self.check_lock()  # else what is staged may be another run's
            # Nothing of this attempt stays but pictures, if it broke off while it made them.
            refused = refused or isinstance(error, ArgumentError)
            made = set(self._staged()) - set(before)
            self.place.remove(name for name in made if refused or not is_kept(name))
            if not self._staged():
                self.place.remove_staging()
            raise
        going_on = self.resume and self.earlier.plan is not None
        # From here on tasks of an earlier run write nothing, or they would what is removed now.
        self._begin_run()
        if going_on:
            self.earlier.keep_what_is_there()
        else:
            self.earlier.remove()
            self.place.remove(name for name in before if not is_kept(name) and name != RUN)
            self._begin(described)
        plan = prepared.plan
        left_out = prepared.reasons.table()
        if len(left_out):
            self.place.put(_LEFT_OUT, table_bytes(left_out))
        facts = {
            "frame": self.token,
            "plan": described["plan"],
            "planned": job.planned,
            "check_columns": going_on,
            "left_out": len(left_out),
            "shards": plan.shards,
            "told": {
                "left_out": prepared.reasons.summary(),
                "damaged": {s.url: s.damage for s in plan.sources if s.damage},
                "interleaved": sum(source.interleaved for source in plan.sources),
                "sources": [source.url for source in plan.sources],
            },
        }
        self.place.put(_FACTS, json.dumps(facts).encode())
        return facts

    def _accepted(self, staged: Staged, prepared: Prepared, read: set[str]) -> dict[str, Any]:
        """A plan in words, if it may be carried out here."""
        plan, options = prepared.plan, self.job.options
        columns = [] if staged.schema is None else [f"{f.name}: {f.type}" for f in staged.schema]
        described = describe_plan(plan, options, self.token, columns)
        if self.resume:
            self.earlier.refuse_other_plan(described)
        files = [name for number in range(plan.shards) for name in options.files_of(number)]
        twice = [name for name, count in Counter(files).items() if count > 1]
        if twice:
            raise ArgumentError(
                f"{options.template!r} gives {plan.shards:,} shards the same names, {twice[0]!r} "
                "among them: number them in full, as 'out/{shard:06d}.tar' does"
            )
        refuse_foreign(self.place, [*files, LEFT_OUT], self.earlier)
        # Of what was computed before, only rows tell what it reads: those that are left out too.
        of_rows = staged.rows.column("url").combine_chunks().dictionary.to_pylist()
        refuse_sources(self.place, [*files, *self.earlier.files], read.union(of_rows))
        return described

    def _begin(self, described: dict[str, Any]) -> None:
        if not self.place.create(PLAN, json.dumps(described, indent=1).encode()):
            raise ExportError(f"another export began in {self.place.url} just now")

    def _begin_run(self) -> str:
        self.check_lock()
        run = begin_run(self.place)
        self.check_lock()
        return run

    def _put_left_out(self, count: int) -> None:
        """Write the table of the rows that are left out, or remove that of a run before."""
        table = self.place.read(_LEFT_OUT) if count else None
        if table is None:
            self.place.remove([LEFT_OUT])
        else:
            self.place.put(LEFT_OUT, table)

    def _sign(self) -> None:
        """Let the plan say whose values the shards have, once all have been written or compared."""
        plan = json.loads(self.place.read(PLAN) or b"{}")
        if plan["frame"] != self.token:
            self.place.put(PLAN, json.dumps(plan | {"frame": self.token}, indent=1).encode())

    def _staged(self) -> list[str]:
        return [f"{STAGING}/{name}" for name in self.place.sizes(STAGING)]

    def _exported(self, manifest: dict[str, Any]) -> Exported:
        told = ("shards", "left_out", "damaged", "interleaved", "sources")
        return Exported(self.place, **{name: manifest[name] for name in told})
