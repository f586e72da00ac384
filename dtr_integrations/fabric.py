"""`AutoCheckpoint` for Fabric, of `lightning` and of `lightning_fabric`. No algorithm: it drives a session.

Fabric has a hook for the end of `setup`, without the optimizers, none for `setup_module` and
`setup_optimizers`, and none for steps: so the three are wrapped, and a step is what lies between a model's
first call and its optimizer's step.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from typing import Any

import torch

from ._loggers import logger_directory
from ._prepared import Prepared
from .config import DTRConfig
from .core.peak import PeakReport
from .errors import ConfigError

__all__ = ["AutoCheckpoint"]

_NAMESPACES = ("lightning.fabric.fabric", "lightning_fabric.fabric")
_SETUPS = ("setup", "setup_module", "setup_optimizers")


class AutoCheckpoint(Prepared):
    """Keeps training with Fabric under an absolute memory budget, at the least slowdown.

        fabric = Fabric(callbacks=[AutoCheckpoint(budget="70GB")])
        model, optimizer = fabric.setup(model, optimizer)

    The model that is set up first is planned at its first training call, before it runs: forward, the loss in
    its output, backward and the optimizer's step, on tensors without data; it is then compiled in place by
    that plan. What the loop makes of the output is seen in the first step, and the second is planned with it;
    accumulation over several backwards is planned for when it is seen; a measured step over the budget is
    planned again with what it showed. Evaluation runs eagerly, and `state_dict` keys do not change.

    Peaks of sampled steps go to Fabric's loggers (`dtr/peak_bytes/rank{i}` and others) and, with a `run_dir`
    or a logger that has a directory, to `peaks-rank{i}.jsonl`.

    Args:
        budget: total memory of one rank's device: ``"70GB"``, ``"65.2GiB"``, ``"90%"`` of it, ``"auto"``.
        **config: fields of `DTRConfig`.

    Attributes:
        session: the run's session; None until a model and its optimizer are set up.
        plan: the `Plan` in force, or None.
        reports: one `PeakReport` for each measured optimizer step.
        report: the plan and the measured peaks as text for people.

    Raises:
        ConfigError: a wrong key or value (a `ValueError`); at `setup`, a model that is compiled already.
        BudgetInfeasible: at the first training call, when no plan fits.
    """

    def __init__(self, budget: str, **config: Any) -> None:
        super().__init__(DTRConfig.from_any(budget=budget, **config))
        self._fabric: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        _watch_setups()

    def look(self, fabric: Any, found: tuple[Any, ...]) -> None:
        """Models and optimizers were set up: begin a session if there is none yet."""
        self._fabric = weakref.ref(fabric)
        for each in found:
            if isinstance(each, torch.optim.Optimizer):
                self._optimizers.append(each.optimizer)
            elif isinstance(each, torch.nn.Module):
                _refuse_compiled(each)
                self._models.append(each.module)
        if self.session is not None:
            return
        logger = fabric.logger if fabric.loggers and self.config.run_dir is None else None
        directory = logger_directory(logger, fabric.broadcast)
        if logger is not None and directory is not None:
            _ = logger.experiment  # some clear a directory that is there before they have begun
        self.begin(
            self._models,
            self._optimizers,
            directory=directory,
            device=fabric.device,
            rank=fabric.global_rank,
            world_size=fabric.world_size,
        )

    def log(self, report: PeakReport) -> None:
        """Log a measured step to Fabric's loggers."""
        fabric = self._fabric()
        if fabric is not None:
            fabric.log_dict(report.metrics, step=report.step)


def _refuse_compiled(module: Any) -> None:
    wrapped = hasattr(module._forward_module, "_orig_mod")
    if wrapped or module.module._compiled_call_impl is not None:
        raise ConfigError(
            f"{type(module.module).__name__} is compiled with torch.compile already. Leave that out: "
            "AutoCheckpoint compiles it, with compile_options= as options."
        )


def _watch_setups() -> None:
    """Wrap the setups of each Fabric that is loaded, once in a process: afterwards its callbacks look."""
    for name in [name for name in _NAMESPACES if name in sys.modules] or _NAMESPACES[:1]:
        fabric = importlib.import_module(name).Fabric
        for setup in _SETUPS:
            if not hasattr(getattr(fabric, setup), "_watched_by_dtr"):
                setattr(fabric, setup, _watched(getattr(fabric, setup)))


def _watched(setup: Any) -> Any:
    @functools.wraps(setup)
    def with_look(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = setup(self, *args, **kwargs)
        for callback in self._callbacks:
            if isinstance(callback, AutoCheckpoint):
                callback.look(self, result if isinstance(result, tuple) else (result,))
        return result

    with_look._watched_by_dtr = True  # type: ignore[attr-defined]
    return with_look
