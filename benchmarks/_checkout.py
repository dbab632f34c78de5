"""Makes this checkout's package importable without installation, also for workers started here."""

import os
import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parent
_PLACES = [str(_BENCHMARKS.parent), str(_BENCHMARKS)]

sys.path[1:1] = _PLACES[:1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_PLACES, *filter(None, [os.environ.get("PYTHONPATH")])]
)
