"""Where the loggers of Lightning and Fabric write."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def logger_directory(logger: Any, broadcast: Callable[[Any], Any]) -> str | None:
    """A logger's directory, the same on every rank; None without a logger, or where it has none on this
    machine. `broadcast`: the first rank's value on every rank, a collective call."""
    if logger is None:
        return None
    directory = getattr(logger, "log_dir", None)
    if directory is None and getattr(logger, "save_dir", None) is not None:
        directory = os.path.join(logger.save_dir, str(logger.name), str(logger.version))
    if directory is not None and "://" in str(directory):
        directory = None
    return broadcast(directory)  # type: ignore[no-any-return]
