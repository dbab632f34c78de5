"""Make faults in a copy of the package, one at a time, and count those that the tests notice.

The faults are of the kind that gives wrong pixels on a GPU now and then: of streams, of memory that
is freed too early, of a kernel. ``make gpu-faults`` runs this; it fails if one goes unnoticed.

    python tests/played/faults.py [words of a fault]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ("tests/played/test_streams.py", "tests/gpu/test_bare.py")

PIXELS = "dask_image_ingest/frames/cudf/pixels.py"
COLUMNS = "dask_image_ingest/frames/cudf/columns.py"
DALI = "dask_image_ingest/decode/dali.py"


class Fault(NamedTuple):
    """Text of a file that a fault replaces, each piece once."""

    name: str
    path: str
    changes: dict[str, str]


_WAIT_IN_APPEND = {
    "            self._wait()\n\n    def finish": "            pass\n\n    def finish"
}
_ADD_UP = "    for (int k = threadIdx.x; k < channels * 256; k += blockDim.x)\n        if"

FAULTS = (
    Fault("append does not wait", PIXELS, _WAIT_IN_APPEND),
    Fault(
        "all copies are waited for at the end",
        PIXELS,
        _WAIT_IN_APPEND
        | {"        if self._end < len": "        self._wait()\n        if self._end < len"},
    ),
    Fault(
        "memory is written to before the default stream is done with it",
        PIXELS,
        {"        self._stream.wait_event(cupy.cuda.get_current_stream().record(ready))\n": ""},
    ),
    Fault(
        "memory is freed before it was moved",
        PIXELS,
        {"        self._wait()\n        self._flat = moved": "        self._flat = moved"},
    ),
    Fault("the stream is blocking", PIXELS, {"Stream(non_blocking=True)": "Stream()"}),
    Fault(
        "DALI's images are copied on the default stream",
        PIXELS,
        {"ctypes.c_void_p(self._stream.ptr)": "ctypes.c_void_p(0)"},
    ),
    Fault(
        "the host's images are copied on the default stream",
        PIXELS,
        {".set(array, stream=self._stream)": ".set(array, stream=cupy.cuda.Stream.null)"},
    ),
    Fault(
        "the host's images are copied while the host waits",
        PIXELS,
        {".set(array, stream=self._stream)": ".set(array)"},
    ),
    Fault(
        "memory is moved on the default stream",
        PIXELS,
        {"(self._flat.data, used, self._stream)": "(self._flat.data, used, cupy.cuda.Stream.null)"},
    ),
    Fault(
        "a new column does not wait for CuPy",
        COLUMNS,
        {"    _wait_for_cupy()\n    if present.all()": "    if present.all()"},
    ),
    Fault(
        "an image column does not wait for CuPy",
        COLUMNS,
        {"    _wait_for_cupy()\n    offsets": "    offsets"},
    ),
    Fault(
        "a copy of DALI's inputs is not kept",
        DALI,
        {
            "self._pipeline.feed_input(name, batch)": "self._pipeline.feed_input(name, batch if "
            "isinstance(batch, (list, np.ndarray)) else tensor_list([*map(np.array, batch)]))",
        },
    ),
    Fault(
        "a copy of the host's images is not kept",
        PIXELS,
        {".set(array, stream": ".set(array.copy(), stream"},
    ),
    Fault("counters are not set to zero", PIXELS, {"blockDim.x) own[k] = 0;": "blockDim.x) ;"}),
    Fault(
        "threads count before all counters are zero",
        PIXELS,
        {"    __syncthreads();\n    long long step": "    long long step"},
    ),
    Fault(
        "threads add up before all have counted",
        PIXELS,
        {f"    __syncthreads();\n{_ADD_UP}": _ADD_UP},
    ),
    Fault("each block counts all", PIXELS, {"(long long)blockIdx.x * blockDim.x + ": ""}),
    Fault("channels are counted as one", PIXELS, {"i % channels * 256 + values": "values"}),
    Fault(
        "shared memory is too small", PIXELS, {"shared_mem=channels * 256 * 4": "shared_mem=256"}
    ),
    Fault("levels start from anything", PIXELS, {"cupy.zeros((channels": "cupy.empty((channels"}),
)


def changed(fault: Fault) -> str:
    """The file with the fault in it.

    Raises
    ------
    ValueError
        If the package no longer has what the fault replaces.
    """
    text = (ROOT / fault.path).read_text()
    for old, new in fault.changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{fault.path} has {text.count(old)} of {old!r}: {fault.name}")
        text = text.replace(old, new)
    return text


def noticed_by(copy: Path) -> str | None:
    """The test of the copy that fails, if one does."""
    environment = os.environ | {"PYTHONPATH": f"{copy / 'tests/played'}{os.pathsep}{copy}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "simulated.plugin", *TESTS]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(done.stdout + done.stderr)
    return failed[1]


def main() -> None:
    """Try all faults, or those with these words in their names."""
    faults = [fault for fault in FAULTS if " ".join(sys.argv[1:]) in fault.name]
    texts = [changed(fault) for fault in faults]
    unnoticed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dask_image_ingest", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if noticed_by(copy):
            sys.exit("The tests fail without a fault, too.")
        for fault, text in zip(faults, texts, strict=True):
            (copy / fault.path).write_text(text)
            test = noticed_by(copy)
            shutil.copy(ROOT / fault.path, copy / fault.path)
            print(f"{fault.name}: {test or 'NOT NOTICED'}", flush=True)
            unnoticed += [] if test else [fault.name]
    print(f"{len(faults) - len(unnoticed)} of {len(faults)} faults are noticed")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
