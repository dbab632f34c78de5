"""Freed memory is kept for the next image where dask would give it back to the system."""

import io
import sys

import numpy as np
import pytest
from PIL import Image
from processes import printed
from tars import tar

IMAGES = 64

PRINT_FAULTS = """
import os, resource
import dask_image_ingest as dii

def read():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    frame = ddf.compute(scheduler="synchronous")
    assert frame["error"].isna().all()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ddf = dii.read_webdataset_images(os.environ["SHARD"], size=224, backend="pandas")
print(min([read() for _ in range(4)]) / len(ddf))
"""


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    file = io.BytesIO()
    noise = np.random.default_rng(5).integers(0, 256, (12, 16, 3), np.uint8)
    Image.fromarray(noise).resize((500, 375)).save(file, "JPEG")
    path = tmp_path_factory.mktemp("large") / "large.tar"
    path.write_bytes(tar({f"{number:03}.jpg": file.getvalue() for number in range(IMAGES)}))
    return path


def faults_of_an_image(shard, trim_threshold: str) -> float:
    """Page faults for each image, in a process whose environment says this."""
    return printed(PRINT_FAULTS, SHARD=str(shard), MALLOC_TRIM_THRESHOLD_=trim_threshold)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is meant")
def test_workers_of_dask_keep_freed_memory_unless_somebody_has_set_it_otherwise(shard):
    assert faults_of_an_image(shard, "65536") < 150
    assert faults_of_an_image(shard, "65537") > 300
