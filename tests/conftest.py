"""Settings of the whole suite."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# torch formats every intermediate graph for this logger as soon as any handler listens, and pytest's does.
logging.getLogger("torch.__trace").disabled = True


# With two workers a long file that comes last is waited for by one of them.
_LONG_FILES = ("test_zoo", "test_gate", "test_apply", "test_hard_cases", "test_lightning", "test_verify")
_LONG_FILES += ("test_own_loop", "test_transformers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    order = {name: number for number, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread: two add up in another order from run to run, and take other scratch memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
