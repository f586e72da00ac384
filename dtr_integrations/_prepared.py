"""Front doors that prepare models and optimizers before a loop of the user's own. No algorithm: they begin a
session when both are there."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .config import DTRConfig
from .core.peak import PeakReport
from .errors import PlanWarning
from .own_loop import UnannouncedSession
from .pipeline import silent
from .session import SessionHolder


class Prepared(SessionHolder):
    """One model that is trained by one optimizer under a budget, as soon as both are prepared.

    Attributes:
        session: the session of the model that is trained; None until it is prepared with its optimizer.
    """

    def __init__(self, config: DTRConfig) -> None:
        self.config = config
        self.session: UnannouncedSession | None = None

    @property
    def report(self) -> str:
        """The plan and the measured peaks as text for people."""
        return self.session.report if self.session is not None else "nothing is prepared yet"

    def close(self) -> None:
        """Restore the model. The plan and the reports stay readable; calling twice is fine."""
        if self.session is not None:
            self.session.close()

    def log(self, report: PeakReport) -> None:
        """A step was measured."""

    def begin(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        directory: str | None,
        rank: int,
        **where: Any,
    ) -> None:
        """Begin a session if a model and its optimizer are there and there is none yet.

        `models` and `optimizers`: all that are prepared so far, without wrappers. `directory`: where peaks
        are written, unless the configuration says. `where`: other arguments of the session.
        """
        trained = _trained(models, optimizers) if self.session is None else []
        if not trained:
            return
        (model, optimizer), *others = trained
        for other, _ in others:
            warnings.warn(
                f"{type(model).__name__} is trained under the budget, and a second model, "
                f"{type(other).__name__}, runs eagerly beside it: its memory is not planned",
                PlanWarning,
                stacklevel=5,
            )
        self.session = UnannouncedSession(
            dataclasses.replace(self.config, run_dir=self.config.run_dir or directory),
            model,
            optimizers=[optimizer],
            rank=rank,
            progress=None if rank == 0 else silent,
            reported=self.log,
            **where,
        )


def _trained(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Each model with the optimizer that steps it; models without one are left out."""
    pairs = []
    for model in models:
        own = {id(parameter) for parameter in model.parameters()}
        for optimizer in optimizers:
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                pairs.append((model, optimizer))
                break
    return pairs
