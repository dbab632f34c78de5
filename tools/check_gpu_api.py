"""Check every name and call that this project uses of the GPU libraries against what is installed.

Modules are imported, names looked up and call signatures bound, but nothing is called: no GPU is
needed, and of the wheels only what their modules import. These 1.6 GB do, without dependencies:

    python -m venv .venv-gpu-api
    .venv-gpu-api/bin/pip install --no-deps -r tools/gpu_api/requirements.txt
    .venv-gpu-api/bin/python tools/check_gpu_api.py --require

Each library is checked that is installed; ``--require`` makes it an error if one is not. Where an
object's class does not show in the code, INSTANCES and RESULTS in this file say what it is; an
entry that matches nothing is an error too. Problems are printed as ``file:line name: problem``; the
exit status is 1 if there is one.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gpu_api.checker import Checker, Tables

ROOT = Path(__file__).parents[1]
PLACES = (
    "dask_image_ingest",
    "tests/gpu",
    "tests/support/gpu_probes.py",
    "benchmarks/gpu.py",
    "benchmarks/_gpu_machine.py",
    "benchmarks/_gpu_ways.py",
)
LIBRARIES = (
    "cudf",
    "cupy",
    "dask_cuda",
    "dask_cudf",
    "nvidia.dali",
    "nvidia.nvimgcodec",
    "pylibcudf",
    "pynvml",
    "rmm",
)

_BATCH = "nvidia.dali.backend.TensorListGPU"
_BUFFER = "cudf.core.buffer.Buffer"
_COLUMN = "cudf.core.column.ColumnBase"

#: What variables are, by file, function and name: objects of a class, or the ``class`` or module
#: itself.
INSTANCES = {
    "dask_image_ingest/frames/cudf/pixels.py": {
        "_queue.images": _BATCH,
        "_copy.images": _BATCH,
        "_copy.out": "cupy.ndarray",
        "_move.moved": "cupy.ndarray",
        "self._flat": "cupy.ndarray",
        "self._reserve()": "cupy.ndarray",
        "self._stream": "cupy.cuda.Stream",
    },
    "dask_image_ingest/frames/cudf/columns.py": {
        "_image_column.child": "pylibcudf.Column",
        "_read.column": _COLUMN,
        "_read.data": "pylibcudf.Column",
        "_memory.buffer": _BUFFER,
        "_memory.spillable": "cudf.core.buffer.spillable_buffer.SpillableBufferOwner",
    },
    "dask_image_ingest/frames/cudf/convert.py": {
        "compacted.column": _COLUMN,
        "compacted.accessed": _COLUMN,
        "_spilled.buffer": _BUFFER,
    },
    "dask_image_ingest/decode/dali.py": {
        "self._pipeline": "nvidia.dali.Pipeline",
        "_build.pipeline": "nvidia.dali.Pipeline",
        "_prime.pipeline": "nvidia.dali.Pipeline",
        "new_pipeline.pipeline_class": "class nvidia.dali.Pipeline",
    },
    "dask_image_ingest/decode/transform.py": {
        "_build.pipeline": "nvidia.dali.Pipeline",
        "_check_output.images": _BATCH,
        "_check_output.types": "class nvidia.dali.types",
    },
    "dask_image_ingest/curate/pixels.py": {
        "luma.xp": "class cupy",
        "make_taps.xp": "class cupy",
        "luma_of_reduced_rows.xp": "class cupy",
        "reduced_columns.xp": "class cupy",
        "reduce_rows.xp": "class cupy",
    },
    "dask_image_ingest/curate/fingerprints.py": {
        "_pdq_of_reduced.xp": "class cupy",
        "_thumbnails.xp": "class cupy",
        "_reduced.xp": "class cupy",
        "_hash.xp": "class cupy",
        "_quality.xp": "class cupy",
        "_cosines.xp": "class cupy",
    },
    "dask_image_ingest/curate/second_look.py": {
        "correlations.xp": "class cupy",
        "_correlations.xp": "class cupy",
        "_products.xp": "class cupy",
        "_fitted.xp": "class cupy",
        "_crops.xp": "class cupy",
        "_crop_weights.xp": "class cupy",
    },
    "dask_image_ingest/curate/quality.py": {
        "pixel_signals.xp": "class cupy",
        "_level_signals.xp": "class cupy",
        "_sampled.xp": "class cupy",
        "_brightness.xp": "class cupy",
        "_percentile.xp": "class cupy",
        "_entropy.xp": "class cupy",
        "_deviation.xp": "class cupy",
        "_histograms.xp": "class cupy",
        "_blur.xp": "class cupy",
        "_thumbnails.xp": "class cupy",
        "_edges.xp": "class cupy",
        "_sharpness.xp": "class cupy",
        "_mean_product.xp": "class cupy",
        "_banded_taps.xp": "class cupy",
        "_fine_detail.xp": "class cupy",
        "_reductions.xp": "class cupy",
    },
    "tests/support/gpu_probes.py": {
        "spilled_bytes.manager": "cudf.core.buffer.spill_manager.SpillManager",
        "spilled_bytes.buffer": "cudf.core.buffer.spillable_buffer.SpillableBufferOwner",
    },
}

#: What attributes and results are that have no annotation, or one that says less.
RESULTS = {
    "Series._column": _COLUMN,
    "ColumnBase.plc_column": "pylibcudf.Column",
    "Column.data()": _BUFFER,
    "Column.type()": "pylibcudf.DataType",
    "Buffer.owner": "cudf.core.buffer.BufferOwner",
    "ndarray.data": "cupy.cuda.MemoryPointer",
    "cupy.empty()": "cupy.ndarray",
}

#: Names that this project itself puts into a library.
OURS = {"cudf.DataFrame.images", "Pipeline.inputs_underway"}


def check(
    places: Iterable[str], tables: Tables
) -> tuple[list[str], set[tuple[str, str]], set[str]]:
    """Problems found, names checked by library, and names without a signature to check."""
    problems: list[str] = []
    checked: set[tuple[str, str]] = set()
    unchecked: set[str] = set()
    for path in _files(places):
        shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
        instances = INSTANCES.get(shown, {})
        checker = Checker(tables, instances)
        checker.check(ast.parse(path.read_text()))
        checked |= checker.checked
        unchecked |= checker.unchecked
        problems += [f"{shown}:{line} {p}" for line, p in dict.fromkeys(checker.problems)]
        problems += [
            f"{shown}: INSTANCES has {key!r}, which is nothing there"
            for key in sorted(instances.keys() - checker.matched)
        ]
    return problems, checked, unchecked


def stale_entries(tables: Tables) -> list[str]:
    """Entries of the tables that no file of the project has a use for."""
    gone = [
        f"INSTANCES names {name}, which is no file"
        for name in INSTANCES
        if not (ROOT / name).exists()
    ]
    if tables.missing:
        # What a result is used for can't be told without its library.
        return gone
    return gone + [
        f"RESULTS has {name!r}, which nothing uses" for name in RESULTS.keys() - tables.used
    ]


def _files(places: Iterable[str]) -> list[Path]:
    paths = [Path(place) if Path(place).is_absolute() else ROOT / place for place in places]
    return [file for p in paths for file in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]


def _arguments() -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "places", nargs="*", help=f"files and folders to check (default: {', '.join(PLACES)})"
    )
    parser.add_argument("--require", action="store_true", help="fail if a library is missing")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was checked")
    return parser.parse_args()


def main() -> int:
    """Check the files, say what was found."""
    arguments = _arguments()
    os.environ["RAPIDS_NO_INITIALIZE"] = "1"  # cuDF then imports without a GPU
    tables = Tables(LIBRARIES, RESULTS, OURS)
    problems, checked, unchecked = check(arguments.places or PLACES, tables)
    if not arguments.places:
        problems += stale_entries(tables)
    missing = [f"{library}: {reason}" for library, reason in tables.missing.items()]
    if arguments.require:
        problems += missing
    print("\n".join(problems), end="\n" if problems else "")
    if arguments.verbose:
        print("checked:", ", ".join(sorted(name for _, name in checked)))
    if unchecked:
        print("names without a signature to check:", ", ".join(sorted(unchecked)))
    if missing and not arguments.require:
        print(f"check_gpu_api: not checked: {'; '.join(missing)}")
    counts = Counter(library for library, _ in checked)
    found = ", ".join(f"{library} {count}" for library, count in sorted(counts.items()))
    print(f"check_gpu_api: {len(checked)} names and calls ({found}), {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
