"""Executors, which run jobs.  Importing this package imports no torch; training code is imported where a job runs."""

from vitlab.executors.base import Executor, JobEnd, executor, read_trial_endings
from vitlab.runner.job import Job, JobTrial, Settings

__all__ = ["Executor", "Job", "JobEnd", "JobTrial", "Settings", "executor", "read_trial_endings"]
