"""Puts the simulated GPU into each process of a rehearsal: ``tools/on_a_card.py --simulated``.

Beyond what the tests need of it, DALI's own names, for benchmarks that use DALI alone, and a few
answers of the driver.
"""

import os

if os.environ.get("SIMULATED_GPU"):
    import simulated.plugin  # noqa: F401 - puts it in place

    from dask_image_ingest.decode import dali

    fn, _, _ = dali.dali()

    import nvidia.dali
    import nvidia.dali.backend
    import nvidia.dali.pipeline
    import pynvml

    nvidia.dali.fn = fn

    class Pipeline(nvidia.dali.Pipeline):
        """One for a CPU, whatever it is asked for."""

        def __init__(self, *, device_id=None, **options):
            super().__init__(device_id=None, **options)

    nvidia.dali.Pipeline = nvidia.dali.pipeline.Pipeline = Pipeline
    nvidia.dali.backend.ReleaseUnusedMemory = lambda: None

    def unknown(*args):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("UtilizationRates", "JpgUtilization", "PcieThroughput", "MemoryInfo"):
        setattr(pynvml, f"nvmlDeviceGet{name}", unknown)
    # None that Dask would watch.
    pynvml.nvmlDeviceGetCount = lambda: 0
    pynvml.nvmlInit = lambda: None
    pynvml.nvmlSystemGetDriverVersion = lambda: "simulated"
    pynvml.nvmlDeviceGetHandleByIndex = lambda number: number

    import cupy

    cupy.cuda.runtime.getDeviceProperties = lambda number: {
        "name": b"simulated GPU",
        "totalGlobalMem": cupy.cuda.runtime.memGetInfo()[1],
    }
    cupy.cuda.runtime.driverGetVersion = cupy.cuda.runtime.runtimeGetVersion = lambda: 12090
