"""Verbs of the pipeline: one file a stage, and no orchestration."""
