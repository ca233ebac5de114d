"""Benchmarks: runnable, with their results committed as data and as a page."""
