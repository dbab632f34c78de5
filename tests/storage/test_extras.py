"""A protocol whose package is missing is an error that names the extra of this package."""

import subprocess
import sys

import pytest

EXTRAS = {
    "s3": ("s3", "s3fs"),
    "s3a": ("s3", "s3fs"),
    "gs": ("gcs", "gcsfs"),
    "gcs": ("gcs", "gcsfs"),
    "az": ("azure", "adlfs"),
    "abfs": ("azure", "adlfs"),
    "abfss": ("azure", "adlfs"),
    "http": ("http", "aiohttp"),
    "https": ("http", "aiohttp"),
}

LISTING = """
import sys
sys.modules[sys.argv[1]] = None
from fsspec.registry import known_implementations
known_implementations.pop("abfss", None)  # adlfs itself tells fsspec of it
from dask_image_ingest.storage import find_shards
from dask_image_ingest.errors import MissingDependencyError
try:
    find_shards(sys.argv[2])
except MissingDependencyError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("protocol", EXTRAS)
def test_the_extra_is_named(protocol):
    extra, package = EXTRAS[protocol]
    command = [sys.executable, "-c", LISTING, package, f"{protocol}://bucket/x.tar"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"pip install 'dask-image-ingest[{extra}]'" in printed
