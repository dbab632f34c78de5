"""CuPy by NumPy: arrays that meet no array of the host, and come there only when asked."""

import contextlib
import ctypes
import importlib.machinery
import inspect
import operator
import sys
import types
import weakref

import numpy as np

from simulated import raw_kernel
from simulated.counts import count
from simulated.memory import POISON, Memory, to_host, view
from simulated.streams import Event, Stream, current, synchronize_device


class UnownedMemory:
    """Memory that somebody else keeps."""

    device_id = 0

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    def copy_from_device_async(self, src, size, stream=None):
        to, source = self.ptr, src.ptr
        (stream or current()).queue(lambda: ctypes.memmove(to, source, size))


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - CuPy's name
    """An array on the device."""

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if memptr is None:
            memory = Memory(size)
            self._set(memory.host.view(dtype).reshape(shape, order=order or "C"), memory)
        else:
            self._set(view(memptr.ptr, size).view(dtype).reshape(shape), memptr.mem)

    def _set(self, host, memory):
        if host.dtype.kind not in "biufc":
            raise ValueError(f"Unsupported dtype {host.dtype}")
        self._host, self._memory = host, memory

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    ndim = property(lambda self: self._host.ndim)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: _on_device(self._host.T, self))
    device = types.SimpleNamespace(id=0)

    @property
    def data(self):
        return MemoryPointer(self._memory, self._host.ctypes.data - self._memory.ptr)

    @property
    def __cuda_array_interface__(self):
        host = self._host
        return {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "strides": None if host.flags.c_contiguous else host.strides,
            "data": (host.ctypes.data if host.size else 0, False),
            "stream": 1,
            "version": 3,
        }

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        if method != "__call__":
            return NotImplemented
        if not out:
            return _call(ufunc, inputs, options)
        hosts, results = [*map(_on_host, inputs)], tuple(map(_on_host, out))
        current().queue(lambda: ufunc(*hosts, out=results, **options))
        return out[0]

    def __array_function__(self, function, kinds, args, options):
        return getattr(sys.modules["cupy"], function.__name__)(*args, **options)

    def __getattr__(self, name):
        method = None if name.startswith("_") else getattr(np.ndarray, name, None)
        if not callable(method):
            raise AttributeError(name)
        return lambda *args, **options: _call(method, (self, *args), options)

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        return _call(np.ndarray.astype, (self, dtype), {"copy": copy})

    def get(self, stream=None, order="C", out=None, blocking=True):
        (stream or current()).catch_up()
        to_host(self.nbytes)
        return self._host.copy(order)

    def set(self, array, stream=None):
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        count("to_device", array.nbytes)
        assert array.flags.c_contiguous
        to, source = self._host, _later(array)
        (stream or current()).queue(lambda: np.copyto(to, source()))
        if stream is None:
            current().synchronize()

    def tolist(self):
        return self.get().tolist()

    def item(self, *args):
        return self.get().item(*args)

    def tobytes(self, *args):
        return self.get().tobytes(*args)

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __index__(self):
        return self.get().__index__()

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (_on_device(self._host[n, ...], self) for n in range(len(self)))

    def __getitem__(self, key):
        host, place = self._host, _index(key)
        parts = place if isinstance(place, tuple) else (place,)
        copies = any(isinstance(part, (np.ndarray, list)) for part in parts)
        return _result(lambda: np.asarray(host[place]), [self], may_be_view=not copies)

    def __setitem__(self, key, value):
        to, key, value = self._host, _index(key), _on_host(value)
        current().queue(lambda: operator.setitem(to, key, value))

    def __repr__(self):
        return f"simulated {self._host!r}"

    def __reduce__(self):
        return asarray, (self.get(),)

    def __dlpack__(self, **options):
        current().catch_up()
        return np.asarray(_Shared(self)).__dlpack__()

    def __dlpack_device__(self):
        return self._host.__dlpack_device__()


class _Shared:
    """What an array of the device shows to NumPy, for those that keep its memory by it."""

    def __init__(self, array):
        self._array = array
        self.__array_interface__ = array._host.__array_interface__


def _later(array):
    """A contiguous array of the host as it is when it is copied; gone if nobody has kept it."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not owner.flags.owndata:
        return lambda: array
    kept, ptr, shape, dtype = weakref.ref(owner), array.ctypes.data, array.shape, array.dtype
    nbytes, gone = array.nbytes, np.frombuffer(bytes([POISON]) * dtype.itemsize, dtype)[0]
    return lambda: gone if kept() is None else view(ptr, nbytes).view(dtype).reshape(shape)


# CuPy's own name of its class, by which libraries know it.
ndarray.__module__ = "cupy"


def _on_host(value):
    """The NumPy array of an array of the device; one of the host is refused, as CuPy does."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def _index(key):
    if isinstance(key, tuple):
        return tuple(map(_index, key))
    if isinstance(key, np.ndarray):  # CuPy takes these
        count("to_device", key.nbytes)
        return key.copy()
    if isinstance(key, ndarray) and key.dtype == bool:
        count("waits")  # for the number of rows
    return _on_host(key)


def _on_device(made, *sources):
    if isinstance(made, (list, tuple)):
        return type(made)(_on_device(each, *sources) for each in made)
    if not isinstance(made, (np.ndarray, np.generic)):
        return made
    made = np.asarray(made)
    array = object.__new__(ndarray)
    for source in sources:
        if _shares(made, source):
            array._set(made, source._memory)
            return array
    memory = Memory(made.nbytes)
    host = memory.host.view(made.dtype).reshape(made.shape)
    current().queue(lambda: np.copyto(host, made))
    array._set(host, memory)
    return array


def _shares(made, source):
    return isinstance(source, ndarray) and made.size and np.may_share_memory(made, source._host)


# Functions that give views where they can, and look at no value for it.
_VIEWS = {
    "ascontiguousarray",
    "astype",
    "broadcast_to",
    "expand_dims",
    "moveaxis",
    "ravel",
    "reshape",
    "squeeze",
    "swapaxes",
    "transpose",
    "view",
}


def _call(function, args, options):
    options = {name: _on_host(value) for name, value in options.items()}
    hosts = [*map(_on_host, args)]
    return _result(lambda: function(*hosts, **options), args, function.__name__ in _VIEWS)


def _result(compute, sources, may_be_view=False):
    """What NumPy makes of arrays, in memory that the stream writes to later."""
    made = compute() if may_be_view else None
    if made is None or not any(_shares(made, source) for source in sources):
        current().catch_up()
        made = compute()
    return _on_device(made, *sources)


def asarray(value, dtype=None, **options):
    """CuPy's, which takes arrays of either side."""
    if isinstance(value, (list, tuple)) and any(isinstance(each, ndarray) for each in value):
        made = _call(np.stack, (value,), {})
        return made if dtype in (None, made.dtype) else made.astype(dtype)
    if isinstance(value, ndarray):
        made = value
    elif hasattr(value, "__cuda_array_interface__"):
        there = value.__cuda_array_interface__
        memory = UnownedMemory(there["data"][0], 0, value)
        made = ndarray(there["shape"], there["typestr"], MemoryPointer(memory, 0))
    else:
        host = np.array(value, dtype)
        count("to_device", host.nbytes)
        return _on_device(host)
    return made if dtype in (None, made.dtype) else made.astype(dtype)


def array(value, dtype=None, copy=True, **options):
    made = asarray(value, dtype)
    return made.copy() if made is value and copy else made


def as_strided(source, shape=None, strides=None):
    return _on_device(np.lib.stride_tricks.as_strided(source._host, shape, strides), source)


class Device(contextlib.nullcontext):
    def __init__(self, device=0):
        super().__init__(self)
        self.id = device

    def synchronize(self):
        synchronize_device()


class CUDARuntimeError(RuntimeError):
    pass


class ElementwiseKernel:
    """A kernel of one expression, which is Python too."""

    def __init__(self, inputs, outputs, operation, name, **options):
        self._names = [parameter.split()[-1] for parameter in inputs.split(",")]
        (self._result,) = (parameter.split()[-1] for parameter in outputs.split(","))
        self._operation = operation

    def __call__(self, *args):
        names = dict(zip(self._names, map(_on_host, args[:-1]), strict=True))
        result = args[-1]._host

        def run():
            exec(self._operation, names)
            result[...] = names[self._result]

        current().queue(run)
        return args[-1]


class RawKernel:
    """A kernel in CUDA's C, compiled for the host where there is a compiler."""

    def __init__(self, source, name, *args, **options):
        self._source, self._name = source, name

    def __call__(self, grid, block, args, shared_mem=0):
        assert all(not isinstance(arg, ndarray) or arg.flags.c_contiguous for arg in args)
        hosts = [*map(_on_host, args)]
        launch = raw_kernel.compiled(self._source, self._name)
        current().queue(lambda: launch(grid, block, hosts, shared_mem))


class Module(types.ModuleType):
    """Functions of NumPy by the names that CuPy has."""

    def __init__(self, name, names, **contents):
        super().__init__(name)
        self._names = names
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(self).update(contents)

    def __getattr__(self, name):
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(np, name)
        if isinstance(value, type) or not callable(value):
            return value
        return lambda *args, **options: _call(value, args, options)


def _names():
    """The names of the real CuPy, which stays out of the way."""
    import cupy

    names = {*dir(cupy)}
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("cupy", "cupyx", "cupy_backends")
    ]:
        del sys.modules[name]
    return names


def install():
    """Have ``import cupy`` give these."""
    runtime = {
        "getDeviceCount": lambda: 1,
        "getDevice": lambda: 0,
        "setDevice": lambda device: None,
        "memGetInfo": lambda: (70 << 30, 80 << 30),
        "CUDARuntimeError": CUDARuntimeError,
        "deviceSynchronize": synchronize_device,
    }
    memory = {"BaseMemory": object, "MemoryPointer": MemoryPointer, "UnownedMemory": UnownedMemory}
    modules = {
        "cupy.cuda.runtime": runtime,
        "cupy.cuda.memory": memory,
        "cupy.cuda": memory
        | {
            "Stream": Stream,
            "Event": Event,
            "Device": Device,
            "get_current_stream": current,
            "set_allocator": lambda allocator: None,
        },
        "cupy.random": {"RandomState": object},
        "cupy.lib.stride_tricks": {"as_strided": as_strided},
        "cupy.lib": {},
        "cupy": {
            "ndarray": ndarray,
            "empty": ndarray,
            "asarray": asarray,
            "asanyarray": asarray,
            "array": array,
            "asnumpy": lambda value: (
                value.get() if isinstance(value, ndarray) else np.asarray(value)
            ),
            "ElementwiseKernel": ElementwiseKernel,
            "RawKernel": RawKernel,
            "__version__": "14.2.0",
        },
    }
    names = _names()
    for name, contents in modules.items():
        sys.modules[name] = Module(name, names if name == "cupy" else (), **contents)
    for name in modules:
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[name])
    assert inspect.ismodule(sys.modules["cupy"].cuda.runtime)
