"""Pickled arrays of bytes read without trusting the pickle: nothing it names is imported, and numpy rebuilds nothing.

The published batches are mappings of strings to lists and arrays of unsigned bytes.  The few names such a pickle needs
are answered with stand-ins that only remember what they are given; every other name is refused.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import DataError


def read_arrays(path: Path) -> dict[str, Any]:
    """The mapping in a pickle of numbers, strings, lists and arrays of bytes, as Python 2 or 3 wrote it.

    Raises:
        DataError: if it holds anything else, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file, encoding="latin1").load()  # latin1: Python 2 kept the bytes of arrays in strings
        if not isinstance(found, dict):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, not a mapping")
        return {str(key): value.array() if isinstance(value, _Array) else value for key, value in found.items()}
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} could not be read: {error}") from None
    except (EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError) as error:
        # A damaged stream makes the machine that runs it stumble over whatever it comes upon.
        raise DataError(f"{path} is damaged: {error!r}") from None


class _Dtype:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, text: object, align: object = 0, copy: object = 0) -> None:
        if text != "u1":
            raise pickle.UnpicklingError(f"it holds an array of {text!r}, and only unsigned bytes (u1) are read")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, of which a byte has none."""


class _Array:
    """Stands in for ``numpy.ndarray``, and for the function that makes an empty one to be filled."""

    def __init__(self, cls: object, shape: object, code: object) -> None:
        self._shape: tuple[int, ...] = ()
        self._data = b""

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, object, bytes | str]) -> None:
        _version, self._shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("it holds an array of unknown type")
        if fortran:
            raise pickle.UnpicklingError("it holds an array stored by columns")
        self._data = data.encode("latin1") if isinstance(data, str) else bytes(data)

    def array(self) -> np.ndarray:
        if len(self._data) != math.prod(self._shape):
            raise pickle.UnpicklingError(f"it holds {len(self._data)} bytes for an array of shape {self._shape}")
        return np.frombuffer(self._data, np.uint8).reshape(self._shape).copy()


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows four names, and none by importing it."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return _Array
            case ("numpy", "ndarray"):
                return "numpy.ndarray"  # only ever handed to the one above
            case ("numpy", "dtype"):
                return _Dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays of bytes are read; nothing was run")
