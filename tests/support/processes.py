"""Code in a process of its own, for what a process decides once."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_TESTS = Path(__file__).parent


def printed(code, **environment):
    """What a fresh process prints as its last line, which is JSON."""
    path = os.pathsep.join([str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        # A file, since processes that it starts may have to import it.
        script = Path(folder) / "script.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
