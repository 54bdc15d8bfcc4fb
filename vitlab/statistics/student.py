"""Student's t without the overhead of scipy.stats, and the validation of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NAN = math.nan


def finite(values: Sequence[float] | Floats) -> Floats:
    """Return values as an array.

    Raises:
        ValueError: for a value that is not finite.
    """
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are not finite; leave them out and say so")
    return x


# The special functions behind scipy.stats.t, which takes a hundred times as long to validate its arguments.


def t_quantile(q: float, df: float) -> float:
    """Return the quantile of Student's t at probability ``q``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, q))


def t_two_sided(t: float, df: float) -> float:
    """Return the two-sided p value of a t statistic."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))
