"""Revisions of the user's git repository, which run beside each other in subprocesses.

:mod:`~vitlab.revisions.checkout` makes a worktree of a commit and an environment that imports it;
:mod:`~vitlab.revisions.cost` measures the time and memory of two revisions in turns.
"""
