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


def random_state() -> dict[str, Any]:
    """The state of every generator that a model may draw from, by name (CUDA's: where it is in use)."""
    state: dict[str, Any] = {"torch": torch.random.get_rng_state(), "Python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["CUDA"] = torch.cuda.get_rng_state_all()
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put a `random_state()` back."""
    torch.random.set_rng_state(state["torch"])
    random.setstate(state["Python"])
    if "CUDA" in state:
        torch.cuda.set_rng_state_all(state["CUDA"])
    if "numpy" in state:
        numpy.random.set_state(state["numpy"])


def same_random_state(one: Any, other: Any) -> bool:
    """Whether two values of `random_state()` under one name are equal."""
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and torch.equal(one, other)
    if isinstance(other, (list, tuple)):
        return (
            isinstance(one, (list, tuple))
            and len(one) == len(other)
            and all(map(same_random_state, one, other))
        )
    return bool((one == other).all() if hasattr(other, "all") else one == other)


@contextlib.contextmanager
def preserved_randomness() -> Iterator[None]:
    """Random state is the same after the block as before it."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
