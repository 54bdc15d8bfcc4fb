"""Judging a handful of replicates honestly: intervals, paired tests, corrections, detectable effects.

A replicate is a seed, so ``n`` is small: 3, 5, perhaps 10.  What that asks for:

- Two arms are compared by the differences at equal seeds, with Student's t; where there are no pairs, Welch's t.
- One replicate has no spread and gets no interval: NaN, never zero.  Two have one degree of freedom, and the interval
  is as wide as that makes it.
- Differences that are all the same have no spread to judge by either; the exact sign-flip test stands in for t.
- No bootstrap below ten replicates, where its intervals hold far less than they say; from ten on BCa cross-checks t.
- A study is one family of comparisons: p values are corrected for it, intervals hold all at once, and what it could
  have detected is said beside what it found.

Non-finite values are refused: whoever calls has to leave out what diverged, and to say so.
"""

from vitlab.statistics.factorial import interaction as interaction
from vitlab.statistics.family import Correction as Correction
from vitlab.statistics.family import Equivalence as Equivalence
from vitlab.statistics.family import corrected as corrected
from vitlab.statistics.family import detectable as detectable
from vitlab.statistics.family import equivalence as equivalence
from vitlab.statistics.family import power as power
from vitlab.statistics.family import seeds_needed as seeds_needed
from vitlab.statistics.family import simultaneous as simultaneous
from vitlab.statistics.replicates import BCA_FROM as BCA_FROM
from vitlab.statistics.replicates import Contrast as Contrast
from vitlab.statistics.replicates import Mean as Mean
from vitlab.statistics.replicates import bca as bca
from vitlab.statistics.replicates import compare as compare
from vitlab.statistics.replicates import mean_interval as mean_interval
from vitlab.statistics.replicates import paired as paired
from vitlab.statistics.replicates import sign_flip as sign_flip
from vitlab.statistics.replicates import smallest_sign_flip_p as smallest_sign_flip_p
from vitlab.statistics.replicates import standardised as standardised
from vitlab.statistics.replicates import welch as welch
from vitlab.statistics.scaling import PowerLaw as PowerLaw
from vitlab.statistics.scaling import pareto as pareto
from vitlab.statistics.scaling import power_law as power_law
from vitlab.statistics.superiority import Superiority as Superiority
from vitlab.statistics.superiority import superiority as superiority
from vitlab.statistics.superiority import superiority_of_pairs as superiority_of_pairs
