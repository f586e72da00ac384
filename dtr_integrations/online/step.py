"""A whole training step under one budget, of which some modules run online and others are compiled.

The runtime sees every operator between compiled graphs. Of a compiled graph it is told how far memory rises
in it: what it may evict makes room for that before the graph runs, and the rest is kept out of its sight. So
what the online modules hold follows what the compiled parts leave at each moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..measure import optimizer_state_tensors
from .memory import Tally
from .scope import DTR

__all__ = ["OnlineReport", "OnlineStep"]


@dataclass(frozen=True, kw_only=True)
class OnlineReport:
    """What the online runtime did for one module so far.

    Attributes:
        module: its name in the model; "" is the model itself, and all that runs outside of the other modules.
        why: it is not compiled.
        evictions, rematerialisations: counts.
        added_seconds: that the rematerialisations took.
    """

    module: str
    why: str
    evictions: int
    rematerialisations: int
    added_seconds: float


class OnlineStep:
    """Opened when a step begins and closed when it ends.

    Args:
        model: its parameters, buffers and gradients count from the start.
        optimizers: so does their state.
        budget_bytes: of all tensors that the step holds at once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        budget_bytes: int,
    ) -> None:
        self._dtr = DTR(model, budget=f"{budget_bytes} B")
        self._runtime = self._dtr._runtime
        self._optimizers = list(optimizers)
        self._why: dict[str, str] = {}
        self._rises: dict[tuple[str, bool], int] = {}
        self._open = False

    def use(
        self, why: Mapping[str, str], *, rises: Mapping[tuple[str, bool], int], budget_bytes: int
    ) -> None:
        """What holds from the next step on.

        Args:
            why: the modules that run online, by name, and the reason for each.
            rises: how far live bytes rise in a compiled graph, by its fingerprint and whether it is the
                backward. A graph that is not there is taken to rise as the highest that is.
            budget_bytes: as of the constructor.
        """
        self._why, self._rises = dict(why), dict(rises)
        self._dtr.budget_bytes = budget_bytes

    @property
    def stats(self) -> Any:
        """The runtime's own counts, of the whole step."""
        return self._dtr.stats

    @property
    def reports(self) -> tuple[OnlineReport, ...]:
        """One for each module; one for "" too, if what runs outside of them was evicted."""
        tallies = self._runtime.memory.tallies
        names = [*self._why, *(name for name in tallies if name not in self._why)]
        return tuple(self._report(name, tallies.get(name, Tally())) for name in names)

    def _report(self, name: str, tally: Tally) -> OnlineReport:
        return OnlineReport(
            module=name,
            why=self._why.get(name, "eager code outside of these modules"),
            evictions=tally.evictions,
            rematerialisations=tally.rematerialisations,
            added_seconds=tally.replay_ns / 1e9,
        )

    def open(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """A step begins; `tensors` (the batch) are there already. Nothing happens if one is under way."""
        if self._open:
            return
        self._dtr.__enter__()
        self._open = True
        try:
            for optimizer in self._optimizers:
                for state in optimizer_state_tensors(optimizer):
                    self._runtime.register(state, "optimizer state")
            for tensor in tensors:
                self._runtime.register(tensor, "the batch")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The step is over, however it ended."""
        if self._open:
            self._open = False
            self._dtr.__exit__(None, None, None)

    @contextlib.contextmanager
    def entering(self, name: str) -> Iterator[None]:
        """Around a call of an online module: its operators are counted under its name. Outside of a step the
        call is a scope of its own."""
        runtime = self._runtime
        outer, runtime.origin = runtime.origin, name
        try:
            with contextlib.nullcontext() if self._open else self._dtr:
                yield
        finally:
            runtime.origin = outer

    def around(
        self, fingerprint: str, is_backward: bool
    ) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
        """Around a call of a compiled graph; see `_backend.Around`."""
        if not self._open:
            return contextlib.nullcontext(_ignored)
        rise = self._rises.get((fingerprint, is_backward))
        if rise is None:
            rise = max((r for (_, way), r in self._rises.items() if way == is_backward), default=0)
        return self._runtime.aside(rise, "a compiled graph")


def _ignored(results: Any) -> None:
    return None
