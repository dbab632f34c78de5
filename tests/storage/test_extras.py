"""A protocol whose package is missing is an error that names the extra of this package."""

import json

import pytest
from forked_python import run_python

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

LISTINGS = """
import json, sys
from fsspec.registry import known_implementations
from dask_image_ingest.storage import find_shards
from dask_image_ingest.errors import MissingDependencyError
told = {}
for protocol, (_, package) in json.loads(sys.argv[1]).items():
    sys.modules[package] = None
    known_implementations.pop("abfss", None)  # adlfs itself tells fsspec of it
    try:
        find_shards(f"{protocol}://bucket/x.tar")
    except MissingDependencyError as error:
        told[protocol] = str(error)
print(json.dumps(told))
"""


@pytest.mark.slow
def test_the_extra_is_named():
    told = json.loads(run_python(LISTINGS, json.dumps(EXTRAS)).stdout)
    assert told.keys() == EXTRAS.keys()
    for protocol, (extra, _) in EXTRAS.items():
        assert f"pip install 'dask-image-ingest[{extra}]'" in told[protocol]
