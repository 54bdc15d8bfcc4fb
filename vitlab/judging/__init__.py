"""Judgement of results from elsewhere: tables and MLflow experiments of any program.

``files`` and ``experiment`` read a table, ``trainings`` finds the value of every arm and seed, ``criterion`` tells goal
and unit, and ``judgement`` compares.
"""
