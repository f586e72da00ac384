"""Keeps a PyTorch training step under an absolute memory budget, at the least slowdown.

    Trainer(callbacks=[AutoCheckpoint(budget="70GB")])           # Lightning
    auto_checkpoint(model, optimizer=optimizer, budget="70GB")   # plain PyTorch

Names are resolved when they are first used (PEP 562): importing this package loads neither torch nor a
framework, so that ``from dtr_integrations.units import parse_bytes`` costs what it looks like, and so that a
front door whose framework is not installed fails when it is asked for and not before.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import auto_checkpoint as auto_checkpoint
    from .api import frontier as frontier
    from .api import plan as plan
    from .api import verify as verify
    from .config import DTRConfig as DTRConfig
    from .core.plan import Plan as Plan
    from .errors import BudgetInfeasible as BudgetInfeasible
    from .lightning import AutoCheckpoint as AutoCheckpoint
    from .units import parse_bytes as parse_bytes

__version__ = "0.1.0.dev0"

_HOMES = MappingProxyType(
    {
        "AutoCheckpoint": "lightning",
        "BudgetInfeasible": "errors",
        "DTRConfig": "config",
        "Plan": "core.plan",
        "auto_checkpoint": "api",
        "frontier": "api",
        "parse_bytes": "units",
        "plan": "api",
        "verify": "api",
    }
)

# Reachable as attributes without an import of their own. No module of this level may bear a name of _HOMES:
# importing it would put the module in the name's place.
_MODULES = frozenset(
    {"accelerate", "config", "core", "dtr", "errors", "fabric", "lightning", "measure", "online", "planner"}
    | {"pytorch_lightning", "report", "transformers", "units"}
)

# Frameworks are extras: the package that a front door needs, and the extra that brings it.
_EXTRAS = MappingProxyType(
    {
        "lightning": "lightning",
        "pytorch_lightning": "lightning",
        "accelerate": "accelerate",
        "transformers": "transformers",
    }
)

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(_imported(_HOMES[name], wanted=name), name)
        globals()[name] = value  # asked once
        return value
    if name in _MODULES:
        try:
            return _imported(name, wanted=f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


def _imported(module: str, *, wanted: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        from .errors import MissingExtra

        raise MissingExtra(what=wanted, package=package, extra=_EXTRAS[package]) from error
