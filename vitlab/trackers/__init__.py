"""Trackers: displays of trials during and after a run.  The trial folders remain the source of truth."""

from vitlab.trackers.base import Tracker as Tracker
from vitlab.trackers.base import Untracked as Untracked
from vitlab.trackers.base import tracker as tracker
from vitlab.trackers.delivery import BackgroundTracker as BackgroundTracker
from vitlab.trackers.delivery import deliver_rest as deliver_rest
from vitlab.trackers.delivery import tracker_of as tracker_of
