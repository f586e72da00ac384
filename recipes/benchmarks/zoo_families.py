"""What a family of the zoo is, and the list of all of them.

`zoo_text` and `zoo_vision` fill the list when they are imported; `load` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of `transformers`, tiny: random weights from a config class, nothing downloaded.

    Attributes:
        name: as on the command line, e.g. `"gpt2"`.
        make: builds the model with the family's own defaults (dropout, tied weights, cache); the harness
            seeds before it and puts it in training mode after it.
        batch: keyword arguments of the model's call, labels included, so that the output has a `.loss`.
        note: what is special about it.
        small: the same with fewer layers, for quick tests; None: it is quick as it is.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    note: str = ""
    small: Callable[[], nn.Module] | None = None


def fewer_layers(kind: Callable[[Any], nn.Module], config: Callable[[], Any]) -> Callable[[], nn.Module]:
    """What builds the model with two layers in each stack that `num_hidden_layers` counts."""

    def small() -> nn.Module:
        fewer = config()
        fewer.num_hidden_layers = 2
        return kind(fewer)

    return small


_families: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family to the zoo. Raises ValueError for a name that is taken."""
    if family.name in _families:
        raise ValueError(f"two families are called {family.name!r}")
    _families[family.name] = family
    return family


def load() -> dict[str, Family]:
    """All families by name, in the order of the tables."""
    import zoo_text  # noqa: F401  (imported for what they register)

    try:
        import zoo_vision  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "zoo_vision":
            raise
    return dict(_families)
