"""Flows, settings and the command line: the only package that imports Prefect."""
