"""Statistics of few replicates: intervals, exact tests, levels of looks, detectable differences, laws of scaling.

:mod:`vitlab.comparison` judges by them.  A single replicate has no spread and no interval: NaN, never zero.  The
bootstrap is not used: of few replicates, its intervals cover less than their nominal level.  Non-finite values raise
ValueError: the caller leaves out diverged trials and reports them.
"""
