"""One training: loop, optimizers, schedules, losses, metrics and checkpoints."""
