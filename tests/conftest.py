"""Settings of the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# torch formats every intermediate graph for this logger as soon as any handler listens, and pytest's does.
logging.getLogger("torch.__trace").disabled = True


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: two add up in another order from run to run, and take other scratch memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
