"""Prefect's own settings, as dartflow ships them; whatever the environment says already stands."""

from __future__ import annotations

import os

_SHIPPED = {
    # Nothing leaves this machine.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # A server that starts with the run needs about 20 s on two cores; the default gives up after 20 s.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # A run that dies is marked as crashed by its silence.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # The terminal shows dartflow's own progress and errors; Prefect's log, tracebacks too, is in its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}


def ship_settings() -> None:
    """Sets what the environment leaves open; must run before Prefect is imported for the first time."""
    for name, value in _SHIPPED.items():
        os.environ.setdefault(name, value)
