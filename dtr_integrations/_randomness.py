"""Python's, numpy's and torch's random state, as one value."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

try:
    import numpy
except ImportError:  # torch works without numpy
    numpy = None  # type: ignore[assignment]


def random_state() -> tuple[Any, ...]:
    """The state of every generator that a model may draw from (accelerators': where they are in use)."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return (
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        torch.random.get_rng_state(),
        torch.cuda.get_rng_state_all() if cuda else None,
    )


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put a `random_state()` back."""
    python_state, numpy_state, torch_state, cuda_states = state
    random.setstate(python_state)
    torch.random.set_rng_state(torch_state)
    if cuda_states is not None:
        torch.cuda.set_rng_state_all(cuda_states)
    if numpy_state is not None:
        numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def preserved_randomness() -> Iterator[None]:
    """Random state is the same after the block as before it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
