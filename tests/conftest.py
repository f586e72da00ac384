"""Settings of the whole suite."""

from __future__ import annotations

import logging

# torch formats every intermediate graph for this logger as soon as any handler listens, and pytest's does.
logging.getLogger("torch.__trace").disabled = True
