"""Faults tried for real: `python -m tests.faults` prints what becomes of a run under each."""
