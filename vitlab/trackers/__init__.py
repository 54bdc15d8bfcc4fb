"""Trackers: where trials are shown while they run and afterwards.  The truth stays in the trial folders."""

from vitlab.trackers.base import Tracker as Tracker
from vitlab.trackers.mlflow import connect as connect
