"""Safe reader of pickled byte arrays: it imports nothing that the pickle names.

The published batches are mappings of strings to lists and arrays of unsigned bytes.  The few names in such a pickle
resolve to inert stand-ins that only store their arguments; every other name is rejected.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import DataError


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the mapping in a Python 2 or 3 pickle of numbers, strings, lists and arrays of bytes.

    Raises:
        DataError: if it holds anything else, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="latin1").load()  # Python 2 stores the bytes of arrays in strings
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a mapping")
        return {str(key): value.array() if isinstance(value, _Array) else value for key, value in content.items()}
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} could not be read: {error}") from None
    except (EOFError, ValueError, TypeError, LookupError, AttributeError, MemoryError, OverflowError) as error:
        # A damaged stream can raise any of these inside the unpickler.
        raise DataError(f"{path} is damaged: {error!r}") from None


class _Dtype:
    """Stand-in for ``numpy.dtype``."""

    def __init__(self, text: object, align: object = 0, copy: object = 0) -> None:
        if text != "u1":
            raise pickle.UnpicklingError(f"it holds an array of {text!r}, and only unsigned bytes (u1) are read")

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order, which single bytes do not have."""


class _Array:
    """Stand-in for ``numpy.ndarray`` and for ``_reconstruct``, which creates an empty one."""

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
        """Return the array, rebuilt from its bytes."""
        if len(self._data) != math.prod(self._shape):
            raise pickle.UnpicklingError(f"it holds {len(self._data)} bytes for an array of shape {self._shape}")
        return np.frombuffer(self._data, np.uint8).reshape(self._shape).copy()


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves four names to stand-ins and rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return _Array
            case ("numpy", "ndarray"):
                return "numpy.ndarray"  # only passed to _reconstruct
            case ("numpy", "dtype"):
                return _Dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays of bytes are read; nothing was run")
