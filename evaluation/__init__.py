"""Measures of rankings and contexts against judgements."""
