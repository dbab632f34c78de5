"""Puts the simulated GPU into each process of a rehearsal: ``tools/on_a_card.py --simulated``.

Beyond what the tests need of it, DALI's own names, for benchmarks that use DALI alone, and a few
answers of the driver. No work is queued: nothing here comes late.
"""

import os

if os.environ.get("SIMULATED_GPU"):
    import simulated.plugin  # noqa: F401 - puts it in place

    from dask_image_ingest.decode import dali

    fn, types, Pipeline = dali.dali()

    import nvidia.dali
    import nvidia.dali.backend
    import nvidia.dali.pipeline
    import pynvml

    nvidia.dali.fn = fn
    nvidia.dali.Pipeline = nvidia.dali.pipeline.Pipeline = Pipeline
    nvidia.dali.backend.ReleaseUnusedMemory = lambda: None

    def unknown(*args):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in dir(pynvml):
        if name.startswith("nvmlDeviceGet"):
            setattr(pynvml, name, unknown)
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlSystemGetDriverVersion = lambda: "simulated"
    pynvml.nvmlDeviceGetHandleByIndex = lambda number: number

    import cupy

    class RawKernel(cupy.RawKernel):
        """Of the kernels that keep a stream busy, nothing."""

        def __call__(self, grid, block, args, **options):
            if self._name != "spin":
                super().__call__(grid, block, args, **options)

    cupy.RawKernel = RawKernel
