"""The front door of Accelerate: `AutoCheckpointPlugin` and `install`. No algorithm: they drive a session.

Accelerate has no hook for the end of preparation and none for steps, so `Accelerator.prepare` is wrapped, and
a step is what lies between a model's first call and its optimizer's step.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, extract_model_from_parallel

from ._autoload import CONFIG
from ._prepared import Prepared
from .config import DTRConfig
from .core.peak import PeakReport
from .errors import ConfigError

__all__ = ["AutoCheckpointPlugin", "Installed", "install"]


class AutoCheckpointPlugin(TorchDynamoPlugin):  # type: ignore[misc, unused-ignore]
    """Keeps training with Accelerate under an absolute memory budget, at the least slowdown.

        accelerator = Accelerator(dynamo_plugin=AutoCheckpointPlugin(budget="70GB"))

    The model that `prepare` gets is planned at its first training call and compiled in place: `state_dict`
    keys do not change, `accumulate()`, mixed precision, `save_state` and `load_state` are as before. See
    `install` for what is planned and measured.

    Args:
        budget: total memory of one rank's device: ``"70GB"``, ``"65.2GiB"``, ``"90%"`` of it, ``"auto"``.
        **config: fields of `DTRConfig`.

    Attributes:
        installed: what `install` returns, once an `Accelerator` prepares a model with this plugin; else None.

    Raises:
        ConfigError: a wrong key or value (a `ValueError`).
    """

    def __init__(self, budget: str, **config: Any) -> None:
        super().__init__(backend="no")  # Accelerate's own compile stays out
        self.config = DTRConfig.from_any(budget=budget, **config)
        self.installed: Installed | None = None
        watch_prepare()


def install(accelerator: Accelerator, *, budget: str, **config: Any) -> Installed:
    """Keep what `accelerator` has prepared, or prepares later, under `budget`.

        accelerator = Accelerator()
        installed = install(accelerator, budget="70GB")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    The model's first training call is planned before it runs: forward, the loss in its output, backward,
    `gradient_accumulation_steps` and the optimizer's step, on tensors without data. What the loop makes of
    the output is seen in the first step, and the second is planned with it; a measured step over the budget
    is planned again with what it showed. Peaks of sampled steps go to the accelerator's trackers, if it has
    any, and, with a `run_dir` or the accelerator's `project_dir`, to `peaks-rank{i}.jsonl`.

    Raises:
        ConfigError: a wrong key or value (a `ValueError`); an accelerator that compiles on its own.
        BudgetInfeasible: at the first training call, when no plan fits.
    """
    installed = Installed(accelerator, DTRConfig.from_any(budget=budget, **config))
    _INSTALLED[accelerator] = installed
    watch_prepare()
    installed.look()
    return installed


class Installed(Prepared):
    """One accelerator's training under a budget.

    Attributes:
        session: the session of the model that is trained; None until it is prepared with its optimizer.
    """

    def __init__(self, accelerator: Accelerator, config: DTRConfig) -> None:
        super().__init__(config)
        self._accelerator = weakref.ref(accelerator)
        backend = accelerator.state.dynamo_plugin.backend
        if backend.value != "NO":
            raise ConfigError(
                f"this Accelerator compiles its models itself (dynamo backend {backend.value}): leave "
                "dynamo_backend, dynamo_plugin and `dynamo_config` of the yaml out; compile_options= takes "
                "Inductor's options"
            )

    def look(self) -> None:
        """Begin a session if a model and its optimizer are prepared and there is none yet."""
        accelerator = self._accelerator()
        if accelerator is None:
            return
        self.begin(
            [
                extract_model_from_parallel(wrapped, keep_torch_compile=True)
                for wrapped in accelerator._models
            ],
            [wrapped.optimizer for wrapped in accelerator._optimizers],
            directory=accelerator.project_dir,
            device=accelerator.device,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            micro_batches=accelerator.gradient_accumulation_steps,
        )

    def log(self, report: PeakReport) -> None:
        """Log a measured step to the accelerator's trackers, if it has any."""
        accelerator = self._accelerator()
        if accelerator is not None and accelerator.trackers:
            accelerator.log(report.metrics, step=report.step)


_INSTALLED: weakref.WeakKeyDictionary[Accelerator, Installed] = weakref.WeakKeyDictionary()


def watch_prepare() -> None:
    """Wrap `Accelerator.prepare`, once in a process: afterwards, what was prepared is looked at."""
    prepare = Accelerator.prepare
    if hasattr(prepare, "_watched_by_dtr"):
        return

    @functools.wraps(prepare)
    def prepared(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        plugin = self.state.dynamo_plugin
        if self not in _INSTALLED and isinstance(plugin, AutoCheckpointPlugin):
            _INSTALLED[self] = plugin.installed = Installed(self, plugin.config)
        elif self not in _INSTALLED and CONFIG in os.environ:  # of `accelerate launch --config dtr.yaml`
            _INSTALLED[self] = Installed(self, DTRConfig.from_any(os.environ[CONFIG]))
        if self in _INSTALLED:
            _INSTALLED[self].look()
        return result

    prepared._watched_by_dtr = True  # type: ignore[attr-defined]
    Accelerator.prepare = prepared
