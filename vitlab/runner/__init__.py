"""Run jobs on a worker: from the specs of trials to their results."""
