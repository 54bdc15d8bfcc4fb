"""Trackers: displays of trials during and after a run.  The trial folders remain the source of truth."""

from vitlab.spec.changes import public as public
from vitlab.trackers.base import Tracker as Tracker
from vitlab.trackers.base import Untracked as Untracked
from vitlab.trackers.base import tracker as tracker
from vitlab.trackers.delivery import BackgroundTracker as BackgroundTracker
from vitlab.trackers.delivery import deliver_rest as deliver_rest
from vitlab.trackers.delivery import tracker_of as tracker_of
from vitlab.trackers.mlflow import MlflowTracker as MlflowTracker
from vitlab.trackers.replay import Cursor as Cursor
from vitlab.trackers.replay import End as End
from vitlab.trackers.replay import Replay as Replay
from vitlab.trackers.replay import TrackedTrial as TrackedTrial
from vitlab.trackers.replay import TrialUpdate as TrialUpdate
