"""A stand-in for CuPy: arrays that refuse what CuPy's refuse, an array of the host."""

import numpy as np


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that meets others of its kind and numbers, and comes to the host by ``get``."""

    def __init__(self, array):
        self._array = np.asarray(array)

    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)
    T = property(lambda self: DeviceArray(self._array.T))

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        assert method == "__call__"
        assert not kwargs
        made = ufunc(*map(_unwrapped, inputs), out=tuple(map(_unwrapped, out)) or None)
        return out[0] if out else DeviceArray(made)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._array, name)
        return lambda *args, **kwargs: DeviceArray(method(*args, **kwargs))

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return map(DeviceArray, self._array)

    def __getitem__(self, key):
        return DeviceArray(self._array[_index(key)])

    def __setitem__(self, key, value):
        self._array[_index(key)] = _unwrapped(value)

    def get(self):
        return self._array.copy()


def _unwrapped(value):
    if isinstance(value, DeviceArray):
        return value._array
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrapped, value))
    assert not (isinstance(value, np.ndarray) and value.ndim), "an array of the host"
    return value


def _index(key):
    return tuple(map(_unwrapped, key)) if isinstance(key, tuple) else _unwrapped(key)


class _Library:
    """NumPy's functions for these arrays; only ``asarray`` takes those of the host."""

    float32, float64, uint8, int64 = np.float32, np.float64, np.uint8, np.int64
    uint16, int32 = np.uint16, np.int32

    @staticmethod
    def asarray(array, dtype=None):
        return DeviceArray(np.asarray(array, dtype))

    def __getattr__(self, name):
        function = getattr(np, name)

        def called(*args, **kwargs):
            made = function(*map(_unwrapped, args), **kwargs)
            return (
                [DeviceArray(each) for each in made]
                if isinstance(made, list)
                else (DeviceArray(made))
            )

        return called


#: What takes the place of the module ``cupy``.
device_library = _Library()
