"""DALI's operators for a CPU in place of those for a GPU, in the package's own pipelines."""

import ctypes
import math
import weakref

from dask_image_ingest.decode import dali as module
from dask_image_ingest.decode import transform
from simulated.counts import count
from simulated.memory import POISON
from simulated.streams import stream_at


class Memory:
    """DALI's memory of a batch, which the next one gets when nobody holds this any more."""


class Images:
    """A tensor or a list of them that is said to be on the GPU."""

    def __init__(self, on_host, memory=None):
        self._on_host, self._memory = on_host, memory or Memory()

    def __len__(self):
        return len(self._on_host)

    def __getitem__(self, place):
        return Images(self._on_host[place], self._memory)

    def __iter__(self):
        return (self[place] for place in range(len(self)))

    def __array__(self, *args, **options):
        raise TypeError("a tensor on the GPU")

    def __getattr__(self, name):
        if name in ("shape", "layout", "ndim", "dtype"):
            return getattr(self._on_host, name)
        raise AttributeError(name)

    def as_cpu(self):
        count("copied_to_host")
        return self._on_host

    def copy_to_external(self, ptr, cuda_stream, non_blocking, use_copy_kernel):
        assert isinstance(ptr, ctypes.c_void_p)
        assert isinstance(cuda_stream, ctypes.c_void_p)
        assert non_blocking, "DALI would wait with the GIL"
        images, held, to = self._on_host, weakref.ref(self._memory), ptr.value
        shapes = images.shape()
        shapes = shapes if isinstance(shapes, list) else [shapes]

        def copy():
            if held() is None:
                ctypes.memset(to, POISON, sum(map(math.prod, shapes)))
            else:
                images.copy_to_external(ptr)

        stream_at(cuda_stream.value).queue(copy)


class Operators:
    """DALI's ``fn``."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        value = getattr(self._real, name)
        if not callable(value):
            return Operators(value)

        def operator(*args, **options):
            if options.get("device") in ("gpu", "mixed"):
                options["device"] = "cpu"
            options.pop("hw_decoder_load", None)
            return value(*args, **options)

        return operator


def install():
    """Have the package's decoders use these."""
    from nvidia.dali import fn, types
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.pipeline import Pipeline
    from nvidia.dali.tensors import TensorListCPU

    class Simulated(Pipeline):
        def __init__(self, *, device_id=None, **options):
            self._on_gpu = device_id is not None
            self._fed = {}
            super().__init__(device_id=None, **options)

        def feed_input(self, name, data, **options):
            if isinstance(data, Images):
                data = data._on_host
            elif isinstance(data, list):
                data = [each._on_host if isinstance(each, Images) else each for each in data]
            if isinstance(data, TensorListCPU):
                self._fed[name] = weakref.ref(data), options
            else:
                super().feed_input(name, data, **options)

        def schedule_run(self):
            """Do so when the outputs are asked for: until then inputs have to be kept."""

        def share_outputs(self, *args):
            for name, (kept, options) in self._fed.items():
                assert kept() is not None, f"{name} is freed, and DALI still reads it"
                super().feed_input(name, kept(), **options)
            self._fed.clear()
            super().schedule_run()
            outputs = super().share_outputs(*args)
            return tuple(map(Images, outputs)) if self._on_gpu else outputs

    DataNode.gpu = lambda self: self
    simulated = Operators(fn), types, Simulated
    module.dali = transform.dali = lambda gpu=False: simulated
