"""Trackers: where trials are shown while they run and afterwards.  The truth stays in the trial folders."""

from vitlab.trackers.address import public as public
from vitlab.trackers.background import Aside as Aside
from vitlab.trackers.base import Tracker as Tracker
from vitlab.trackers.base import Untracked as Untracked
from vitlab.trackers.base import tracker as tracker
from vitlab.trackers.mlflow import MlflowTracker as MlflowTracker
from vitlab.trackers.replay import Cursor as Cursor
from vitlab.trackers.replay import End as End
from vitlab.trackers.replay import Replay as Replay
from vitlab.trackers.replay import TrialUpdate as TrialUpdate
from vitlab.trackers.tracked_trials import Shown as Shown
