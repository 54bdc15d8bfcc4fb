"""Judgement of results from elsewhere: tables and MLflow experiments of any program.

``files`` and ``experiment`` read a table, ``words`` says what names of columns and cells mean, ``cells`` reads values,
``trainings`` finds the value of every arm and seed, ``criterion`` tells goal and unit, and ``judgement`` compares.
"""
