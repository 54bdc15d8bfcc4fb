"""Engines, which compute the steps and evaluations of several trainings together, and the schedule that drives them."""
