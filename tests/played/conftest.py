"""Tests on a simulated GPU. `make gpu-api` runs them, and nothing else: the GPU has to be in place
before cuDF and CuPy are imported, and stays for the whole process.
"""

import sys
from pathlib import Path

import pytest

collect_ignore_glob = [] if "simulated.plugin" in sys.modules else ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # What RAPIDS' own packages warn of is not this package's to mend.
            item.add_marker(pytest.mark.filterwarnings("default"))
