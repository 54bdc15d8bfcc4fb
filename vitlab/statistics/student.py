"""Student's t without the cost of asking scipy.stats, and the numbers that everything here takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NAN = math.nan


def finite(values: Sequence[float] | Floats) -> Floats:
    """Values as an array.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; leave them out and say so")
    return x


# The special functions behind scipy.stats.t, which spends a hundred times as long on reading its arguments.


def t_quantile(q: float, df: float) -> float:
    """The value that Student's t stays below with probability ``q``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, q))


def t_two_sided(t: float, df: float) -> float:
    """Chance of a t as far from 0, on either side."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))
