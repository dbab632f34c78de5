"""Which of DALI's errors are the GPU's own, for which no image is to blame."""

import numpy as np
import pytest
from synthetic import encode, photograph

from dask_image_ingest.decode.resources import is_gpu_failure

PIPELINE = """Critical error in pipeline:
Error in MIXED operator `nvidia.dali.fn.decoders.image`,
which was used in the pipeline definition with the following traceback:

  File "/opt/{folder}/site-packages/dask_image_ingest/decode/dali.py", line 136, in _build
    images = fn.decoders.image(

encountered:

{message}
Current pipeline object is no longer valid."""

FOLDERS = ["venv", "cuda-12.9", "alloc", "out of memory"]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    "message",
    [
        # As libdali, libdali_core and nvImageCodec 0.9 have them.
        "CUDA allocation failed",
        "Can't allocate 129499136 bytes on device 0.",
        "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory",
        "CUDA runtime API error cudaErrorIllegalAddress (700):\nan illegal memory access",
        "std::bad_alloc",
        "nvImageCodec failure: '#5'",
        "Error in thread 3: [/opt/dali/dali/core/mm/pool.cc:33] CUDA allocation failed\n"
        "Stacktrace (2 entries):\n[frame 0]: /opt/venv/nvidia/dali/libdali_core.so(+0x1) [0x2]",
    ],
)
def test_trouble_of_the_gpu_is_told_wherever_the_package_lies(folder, message):
    assert is_gpu_failure(PIPELINE.format(folder=folder, message=message))
    assert is_gpu_failure(message)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    "message",
    [
        "Failed to decode sample #3 : ",
        "Failed to decode sample #3 : /data/cuda/alloc.jpg",
        "nvImageCodec failure: '#4'",
        "nvImageCodec failure: '#51'",
        "Error in thread 0: [/opt/dali/dali/cuda/alloc.h:500] Invalid sample_type: 0\n"
        "Stacktrace (2 entries):\n[frame 0]: /opt/cuda/nvidia/dali/libdali_core.so(+0x1) [0x2]",
    ],
)
def test_a_bad_image_is_no_trouble_of_the_gpu_wherever_the_package_lies(folder, message):
    assert not is_gpu_failure(PIPELINE.format(folder=folder, message=message))
    assert not is_gpu_failure(message)


def test_what_dali_says_of_a_bad_image_is_no_trouble_of_the_gpu():
    """The text of the release that is installed, in which the path of this file stands."""
    dali = pytest.importorskip("nvidia.dali")
    good = encode(photograph(60, 80))
    table = good.index(b"\xff\xc4") + 5
    for bad in (b"this is no image" * 10, good[:table] + b"\xff" * 16 + good[table + 16 :]):
        pipeline = dali.Pipeline(batch_size=2, num_threads=1, device_id=None)
        with pipeline:
            encoded = dali.fn.external_source(name="images", ndim=1, dtype=dali.types.UINT8)
            pipeline.set_outputs(dali.fn.decoders.image(encoded))
        pipeline.build()
        pipeline.feed_input("images", [np.frombuffer(image, np.uint8) for image in (good, bad)])
        with pytest.raises(RuntimeError) as failed:
            pipeline.run()
        text = str(failed.value)
        assert __file__ in text
        assert not is_gpu_failure(text.replace(__file__, "/opt/cuda/alloc/dali.py"))
