"""What is known before any configuration is read."""

from __future__ import annotations

# The prefix of environment variables that hold settings.
PREFIX = "DARTFLOW_"

# The store when nothing names one.
DEFAULT_STORE = ".dartflow"
