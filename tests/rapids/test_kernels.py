"""Kernels compile, for which no GPU is needed: what they compute is for ``tests/gpu``."""

import gpu_probes
import pytest

from dask_image_ingest.frames.cudf import pixels

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.parametrize("architecture", [b"compute_75", b"sm_90"])
@pytest.mark.parametrize("source", [pixels.SOURCE, gpu_probes.SPIN], ids=["levels", "spin"])
def test_a_kernel_compiles(source, architecture):
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=" + architecture])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
