"""Executors, which run jobs.  Importing this package imports no torch; training code is imported where a job runs."""

from vitlab.executors.base import Executor as Executor
from vitlab.executors.base import JobEnd as JobEnd
from vitlab.executors.base import executor as executor
from vitlab.executors.base import read_trial_endings as read_trial_endings
from vitlab.runner.job import Job as Job
from vitlab.runner.job import JobTrial as JobTrial
from vitlab.runner.job import Settings as Settings
