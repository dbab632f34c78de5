"""``to_webdataset``: write a frame's samples as WebDataset shards, with their original bytes.

The steps: lock, stage the frame, plan, write shards, write the manifest.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pandas as pd

from dask_image_ingest.arguments import (
    check_choice,
    check_storage_options,
    is_utf8,
    is_whole,
    number_of_bytes,
    shown,
    whole_number,
)
from dask_image_ingest.computing import one_task_per_item
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.dataset import files_read, searches_of_frame
from dask_image_ingest.dataset.schema import part_columns
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.export.files import (
    FORMAT,
    LEFT_OUT,
    MANIFEST,
    PLAN,
    ExportContext,
    Options,
    PreviousExport,
    file_names,
    find_previous,
    parquet_bytes,
    result_frame,
    shard_files,
)
from dask_image_ingest.export.members import Members, add_stored, parse_members, with_part
from dask_image_ingest.export.query import (
    as_query,
    frame_fingerprint,
    reads_samples,
    shards_read,
    source_options_of,
)
from dask_image_ingest.export.shard_plan import ShardPlan, make_plan
from dask_image_ingest.export.staging import columns_to_export, stage_frame
from dask_image_ingest.export.stored_images import ImageOrigin, image_origin
from dask_image_ingest.export.write_shards import write_shard
from dask_image_ingest.frames import image_columns, reference_columns
from dask_image_ingest.storage.output import (
    EXPORT_ADVICE,
    REPLACEMENT,
    STAGING,
    OutputStore,
    acquire,
    begin_run,
    open_output,
    refuse_other_run,
    refuse_sources,
    replacement_of,
    swap,
)
from dask_image_ingest.typedefs import AnyFrame
from dask_image_ingest.url_secrets import url_identity


def to_webdataset(
    frame: AnyFrame,
    path: str | os.PathLike[str],
    *,
    samples_per_shard: int | None = None,
    bytes_per_shard: int | str | None = None,
    shuffle: int | None = None,
    members: str | Sequence[Any] | Mapping[str, Any] = "all",
    errors: Literal["null", "raise", "drop"] = "null",
    row_errors: Literal["raise", "drop"] = "raise",
    sidecar: Literal["parquet"] | None = "parquet",
    index: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    source_options: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """Write the samples of a frame as WebDataset shards, each member byte for byte as it was.

    Only the metadata columns of the frame are computed. No image is decoded, unless ``members``
    encodes pixels. Then each sample's members are copied from its shard, one task for each
    new shard. The frame may be the result of any filter, join, sort or shuffle; its order is kept.
    A frame whose pixels differ from the stored ones is refused, unless ``members`` encodes them.

    Parameters
    ----------
    frame
        A dask, pandas or cuDF dataframe with the columns ``__key__``, ``__url__`` and ``offset`` of
        :func:`read_webdataset_images`, or of :func:`read_images`: each file is the image of its
        sample. ``__key__`` names the samples; it may be changed. Images that belong to none of
        these samples (of :func:`read_parquet_images`, of a column of bytes, of files that were
        merged) are written as they are stored: a column ``image`` as ``jpg``, ``png`` and so on, by
        their contents, another one as ``mask.png``.
    path
        Template of the shards' names, with a field for the number: ``"out/{shard:06d}.tar"``. A
        path, or a URL of a file system that fsspec writes to.
    samples_per_shard
        Number of samples of each shard but the last; 10,000 unless ``bytes_per_shard`` is given.
    bytes_per_shard
        Largest size of a shard, headers included: ``"1 GB"``. A larger sample gets a shard of its
        own. With ``samples_per_shard`` too, a shard ends at whichever limit comes first.
    shuffle
        Seed of a random order over all shards. The result does not depend on the frame's order.
    members
        ``"all"``; a list of extensions, ``["jpg", "txt"]``; or a mapping for members from columns,
        ``{"txt": "caption", "json": ["caption", "score"], "cls": None}``: these are added to the
        sample's own members or replace them, and None leaves one out. A list may hold mappings.
        A list of columns sets fields of a JSON member: those of the sample's own are replaced or
        added, and everything else of it stays as it is; ``json.caption`` is the field ``caption``.
        Text is written as UTF-8, bytes as they are, numbers in decimal, lists, structs and several
        columns as JSON; a null gives no member. Pixels are encoded: ``{"jpg": "image"}`` replaces
        the sample's own image, and ``{"mask.png": "mask"}``, whose extension has several parts, is
        added beside it;
        ``{"jpg": Encode("image", quality=90)}`` has settings.
    errors
        What to do with an image that can't be decoded: ``"null"`` keeps the row, and copies the
        image undecoded; ``"drop"`` drops the row and counts it; ``"raise"`` raises before anything
        is written. The last two decode every image of the column ``image``.
    row_errors
        What to do with a row that can't be exported (a key that readers would not give back, a
        repeated sample, a missing shard): ``"raise"`` raises before anything is written, ``"drop"``
        drops the row and counts it. If no shard can be read, both raise.
    sidecar
        ``"parquet"`` writes a table of all metadata columns beside each shard, computed ones
        included, whose ``__url__``, ``offset`` and ``nbytes`` point to the new shard. None writes
        none.
    index
        Write ``.idx`` files, as wds2idx does, for DALI's reader.
    resume
        Resume a killed run of the same export; finished shards are not written again.
    overwrite
        Replace an earlier export when the new one is whole, and log the names of its files. Other
        files stay. Refused if the frame reads from these files, if the new export has no rows, and
        if a shard is unreadable.
    storage_options
        Options of the output's file system.
    source_options
        Options of the file systems of the source shards. By default those of the frame's reads,
        which a computed or persisted frame has lost.

    Returns
    -------
    pandas.DataFrame
        A row for each shard: ``shard``, ``url``, ``samples``, ``members``, ``bytes``, ``sha256``.
        Its ``attrs`` have ``left_out`` (counts of rejected rows by reason), ``damaged`` (damage of
        source shards), ``interleaved`` (number of samples whose members were not adjacent in their
        shard, and are now), ``sources`` (the source shards) and ``folder`` (of the new shards).

    Raises
    ------
    ArgumentError
        If arguments contradict each other, if rows can't be exported, if shards were read with
        different options, or if pixels of an image column differ from the stored images: encode
        the column, or drop it to copy the stored images.
    ExportError
        If the folder can't be written to, has other files of these names or an export already, if
        another export is writing there, or if the frame's next read would find what is written.
    ShardError, ShardNotFoundError
        If a source changes while it is copied.

    Notes
    -----
    A shard appears under its name when it is complete. ``_plan.json`` is written first,
    ``_manifest.json`` last, with sizes and SHA-256 of all files; ``_left_out.parquet`` has the
    rejected rows. The same samples give the same bytes, however the frame is partitioned.

    Examples
    --------
    >>> table = read_webdataset_images("train-{000..003}.tar").drop(columns=["image", "error"])
    >>> wide = table[table.width >= 400]
    >>> written = to_webdataset(wide, "wide/{shard:03d}.tar", samples_per_shard=10)
    >>> written[["shard", "samples", "members"]]
         shard  samples  members
    0  000.tar       10       40
    1  001.tar       10       40
    2  002.tar        8       32
    """
    frame = as_query(frame)
    output, template = _split_path(path, check_storage_options(storage_options))
    source_options = check_storage_options(source_options)
    if sidecar not in ("parquet", None):
        raise ArgumentError(f"sidecar={sidecar!r}; choose 'parquet' or None")
    check_choice("errors", errors, ("null", "raise", "drop"))
    check_choice("row_errors", row_errors, ("raise", "drop"))
    if shuffle is not None and not is_whole(shuffle):
        raise ArgumentError(f"shuffle={shown(shuffle)}: pass a number, the seed of the order")
    if samples_per_shard is not None:
        samples_per_shard = whole_number("samples_per_shard", samples_per_shard, 1)
    elif bytes_per_shard is None:
        samples_per_shard = _SAMPLES_PER_SHARD
    nbytes = number_of_bytes(bytes_per_shard)
    if nbytes is None and bytes_per_shard is not None:
        raise ArgumentError(
            f"bytes_per_shard={bytes_per_shard!r}: pass bytes, or a text such as '1 GB'"
        )
    columns = columns_to_export(frame)
    has_samples = {"__url__", "offset"} <= {*columns}
    selection = _checked_members(frame, members, columns, has_samples)
    part = _part_written(columns, selection)
    options = Options(
        template=template,
        samples_per_shard=samples_per_shard,
        bytes_per_shard=nbytes,
        shuffle=None if shuffle is None else int(shuffle),
        members=with_part(selection) if part else selection,
        has_samples=has_samples,
        part=part,
        sidecar=sidecar is not None,
        index=bool(index),
        errors=errors,
        row_errors=row_errors,
    )
    if errors != "null" and "error" not in frame.columns and not options.members.pixels:
        raise ArgumentError(
            f"errors={errors!r} needs the column 'error' of the read, which the frame has not"
        )
    if source_options is None:
        source_options = source_options_of(frame)
    context = ExportContext(output, options, output.url, source_options)
    return run_export(frame, columns, context, resume=resume, overwrite=overwrite)


_SAMPLES_PER_SHARD = 10_000


def _split_path(
    path: str | os.PathLike[str], storage_options: dict[str, Any] | None
) -> tuple[OutputStore, str]:
    """Split a path of shards into the output folder and the template of their names."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentError(f"{path!r} is no path")
    folder, slash, template = text.rpartition("/")
    if not _is_template(template) or "{" in folder or "\0" in folder:
        raise ArgumentError(
            f"{text!r} is no name for shards: it needs one field for their number, in its last "
            "part, and ends with .tar, as 'out/{shard:06d}.tar' does"
        )
    return open_output(f"{folder}{slash}" or ".", EXPORT_ADVICE, storage_options), template


def _is_template(template: str) -> bool:
    """True for a name of tar files, which differs by the number of the shard."""
    try:
        names = {template.format(shard=number) for number in (0, 1)}
    except (ValueError, LookupError):
        return False
    is_name = template.endswith(".tar") and not template.startswith((".", "_"))
    return len(names) == 2 and is_name and all(map(_is_file_name, names))


def _is_file_name(name: str) -> bool:
    return is_utf8(name) and len(name.encode()) <= 255 and name.isprintable() and " " not in name


def _checked_members(
    frame: AnyFrame,
    members: str | Sequence[Any] | Mapping[str, Any],
    columns: Sequence[str],
    has_samples: bool,
) -> Members:
    """Parse ``members``, and check that no image of the frame is lost."""
    pixels, references = image_columns(frame), reference_columns(frame)
    origins = {name: image_origin(frame, name) for name in (*pixels, *references)}
    selection = parse_members(members, columns, {n: origins[n] for n in pixels}, references)
    for name, origin in origins.items():
        # Images that no sample has, hence would be lost unless they are written as they are.
        is_foreign = origin.member is None or not has_samples
        if is_foreign and origin.changed_by is None and name not in selection.columns:
            is_main = name == "image" or (not has_samples and len(origins) == 1)
            selection = add_stored(selection, name, is_main)
    _refuse_silent_changes(origins, selection)
    # Of samples that lack their locations, only pixels that the user names are not lost.
    is_made = bool(selection.from_columns) and not reads_samples(frame)
    if not has_samples and not is_made and not selection.pixels:
        missing = [name for name in ("__url__", "offset") if name not in columns]
        raise ArgumentError(
            f"the frame has no column {', '.join(map(repr, missing))}: to_webdataset needs "
            "__url__ and offset, which say where each sample is, or images to write"
        )
    return selection


def _part_written(columns: Sequence[str], members: Members) -> tuple[str, ...]:
    """The columns that tell the part of the image that is written in place of each sample's."""
    parts = part_columns(columns)
    written = [*(member.columns for member in members.pixels), *members.stored]
    return next((parts[image] for image in written if image in parts), ())


def _refuse_silent_changes(origins: Mapping[str, ImageOrigin], members: Members) -> None:
    """Refuse to drop changed pixels silently, or to copy the stored images in their place."""
    encoded = {member.columns for member in members.from_columns}
    for name, origin in origins.items():
        if name in encoded or origin.changed_by is None:
            continue
        if origin.member is None:
            would, refuse = "leave them out", members.copied is None
            drop = "leaves them out"
        else:
            would, refuse = "write the stored images", members.copies_images
            if origin.member == "other":
                refuse = any(map(members.keeps, origin.extensions)) or not origin.extensions
            drop = "says that the stored images are meant"
        if refuse:
            raise ArgumentError(
                f"the pixels of {name!r} come from {origin.changed_by}, and to_webdataset would "
                f"{would}. "
                f"members={{{origin.extension(name)!r}: {name!r}}} encodes the pixels; "
                f"drop(columns={name!r}) first {drop}"
            )


# The rejected rows, until the plan is written: before it, the folder holds no file of an export.
_STAGED_LEFT_OUT = f"{STAGING}/left_out.parquet"


def run_export(
    frame: AnyFrame,
    columns: Sequence[str],
    context: ExportContext,
    *,
    resume: bool,
    overwrite: bool,
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
            previous.refuse_other(token, context.options)
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
