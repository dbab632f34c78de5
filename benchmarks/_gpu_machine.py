"""The machine that is measured: what it is, and what of it is busy while a run goes on."""

import contextlib
import datetime
import os
import sys
import threading
import time
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version

from _gpu_images import cores

PACKAGES = (
    "nvidia-dali",
    "nvidia-nvimgcodec",
    "cudf",
    "cupy",
    "rmm",
    "dask-cuda",
    "dask",
    "numpy",
    "pillow",
    "webdataset",
)

#: What is told by its largest value; of the rest the mean.
_PEAKS = ("GPU memory MB", "busiest process %")


class Busy:
    """Samples how busy the machine is while a run goes on."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def watch(self):
        """Sample until the block ends."""
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def figures(self) -> dict[str, float]:
        """What was seen, in one number each."""
        return {
            name: max(values) if name in _PEAKS else sum(values) / len(values)
            for name, values in self.seen.items()
            if values
        }

    def limit(self) -> str:
        """What the run seems to have waited for."""
        found = self.figures()
        if found.get("JPEG engines %", 0) >= 90:
            return "limited by the decoder: its JPEG engines are busy"
        if found.get("GPU %", 0) >= 95:
            return "limited by the GPU: its cores are busy"
        if found.get("CPU %", 0) >= 95:
            return "limited by the host: all cores are busy"
        if found.get("busiest process %", 0) >= 95 and found.get("CPU %", 0) < 60:
            return "limited by the host: a process keeps one core busy"
        return "no single limit is seen"

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:,.0f}" for name, value in self.figures().items())

    def _sample(self, stop: threading.Event) -> None:
        import psutil
        import pynvml

        pynvml.nvmlInit()
        handle = nvml_handle()
        probes = {
            "GPU %": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "JPEG engines %": lambda: pynvml.nvmlDeviceGetJpgUtilization(handle)[0],
            "PCIe to GPU MB/s": lambda: (
                pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES) / 1e3
            ),
            "GPU memory MB": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
            "CPU %": lambda: psutil.cpu_percent(),
            "busiest process %": _Processes().busiest,
        }
        psutil.cpu_percent()
        while not stop.wait(0.1):
            for name, probe in probes.items():
                # Not every card answers each of them, nor every virtual machine.
                with contextlib.suppress(pynvml.NVMLError, psutil.Error):
                    self.seen[name].append(probe())


class _Processes:
    """This process and those that it started: workers."""

    def __init__(self) -> None:
        import psutil

        self._own = psutil.Process()
        self._known = {}

    def busiest(self) -> float:
        """Percent of one core since the last call, of the process that used most."""
        for process in [self._own, *self._own.children(recursive=True)]:
            self._known.setdefault(process.pid, process)
        return max(
            process.cpu_percent() for process in self._known.values() if process.is_running()
        )


def nvml_handle():
    """The first visible GPU, as NVML knows it."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if visible.isnumeric():
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    return pynvml.nvmlDeviceGetHandleByUUID(visible)


def measure(run, repeats: int) -> tuple[float, Busy]:
    """Images per second in the best run, and what was busy in it."""
    settle = getattr(run, "settle", lambda: None)
    run()
    settle()
    best, busy_then = 0.0, Busy()
    for _ in range(repeats):
        busy = Busy()
        watched = busy.watch() if gpu_name() else contextlib.nullcontext()
        with watched:
            start = time.perf_counter()
            count = run()
            speed = count / (time.perf_counter() - start)
        settle()
        if speed > best:
            best, busy_then = speed, busy
    return best, busy_then


def print_machine() -> None:
    """What the figures are of."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    print(f"{gpu_name()}, driver {pynvml.nvmlSystemGetDriverVersion()}, ", end="")
    print(f"CUDA {cupy.cuda.runtime.runtimeGetVersion()}, {cores()} CPU cores")
    print(", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name))))
    print(f"{datetime.date.today()}: python {' '.join(sys.argv)}\n", flush=True)


def gpu_name() -> str | None:
    """The GPU's name; None where there is none, or nothing to use it with."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except ImportError:
        return None
    except cupy.cuda.runtime.CUDARuntimeError:
        return None


def installed(name: str) -> str | None:
    """A package's version, whichever CUDA it was built for."""
    for suffix in ("", "-cu13", "-cu12", "-cuda130", "-cuda120", "-cuda13x", "-cuda12x"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name + suffix)
    return None


def release_memory() -> None:
    """Give back what DALI's pools in this process keep."""
    import gc

    from nvidia.dali import backend

    gc.collect()
    backend.ReleaseUnusedMemory()
