"""Execution of a plan: which job runs when, and what is asked before it runs."""
