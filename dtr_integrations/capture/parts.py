"""Which parts of a step torch.compile can take: the second rung of the fallback ladder.

A target that does not compile is looked into: the modules that it calls are compiled one by one, those that
fail are looked into in turn, and so on. A module that fails though all that it calls compiles is the one at
fault. It is left out, and what torch.compile can take around it and inside of it is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import CaptureError
from .called import ReadsData, calls_inside, reads_of_data
from .costs import measured_rates
from .fake import FakeWorld
from .scratch import Scratch
from .source import FakeStep, StepSource
from .step import Captured, Parts, Recorder, TargetsFailed, capture, dry_step, in_words

_MAX_TRIES = 8
_SKIPPED = "torch.compile made no graph of it: it holds a hook or Python that Dynamo skips"


def capture_parts(
    source: StepSource,
    *,
    parts: Parts | None = None,
    failed: Mapping[str, str] | None = None,
    endless: Mapping[str, str] | None = None,
    online: bool = False,
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    scratch: Scratch | None = None,
) -> Captured:
    """`capture`, of as much of the step as torch.compile can take; `.parts` says what was left out and why.

    `parts`: what is known already (from an earlier step of the run); `failed`: targets that have failed
    since, when they ran for real, and why; `endless`: targets that are compiled anew without end. `online`:
    what is left out runs under the online runtime, and modules that depend on data are left out too. Raises
    `CaptureError` when the step cannot be run without data.
    """
    search = _Search(source, options)
    if online and parts is None:
        parts = search.without_data()
    for name, why in dict(failed or {}).items():
        parts = search.replaced(parts, {name: why})
    if endless:  # all that they call sees the same shapes
        parts = search.replaced(parts, endless, inside=False)
    for _ in range(_MAX_TRIES):
        try:
            captured = capture(source, options=options, device=device, scratch=scratch, parts=parts)
        except TargetsFailed as error:
            try:
                parts = search.without(parts, error.reasons, whole=error.whole)
            except CaptureError as other:
                raise CaptureError(f"{other}; torch.compile cannot take {error}") from error
            continue
        skipped = [name for name in captured.without_graph if search.may_help(name)]
        if not skipped:
            return captured
        parts = search.without(parts, dict.fromkeys(skipped, _SKIPPED))
    raise CaptureError(
        f"torch.compile still fails with {len(parts.excluded if parts else ())} modules left out"
    )


class _Search:
    """Finds the modules at fault."""

    def __init__(self, source: StepSource, options: dict[str, Any] | None) -> None:
        self.source = source
        self.options = options

    @cached_property
    def step(self) -> FakeStep:
        """The step's twin, to look at."""
        return self.source.build(FakeWorld())

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The twin's modules by name."""
        return dict(self.step.model.named_modules())

    @cached_property
    def _inside(self) -> dict[str, tuple[str, ...]]:
        try:
            return calls_inside(self.source)
        except Exception as error:
            raise CaptureError(
                f"the step cannot be run on tensors without data: {in_words(error, self.step.model)}"
            ) from error

    def inside(self, name: str) -> tuple[str, ...]:
        """The modules that `name` calls itself."""
        return self._inside.get(name, ())

    def without_data(self) -> Parts:
        """The parts that do not depend on data. Where shapes do, all that the module calls does."""
        reads = {name: why for name, why in self._reads_of_data.items() if self._is_in_targets(name)}
        whole = [name for name, why in reads.items() if why.shapes]
        parts = Parts(targets=tuple(self.step.targets), online=True, sized=not whole)
        parts = self.replaced(parts, {n: str(why) for n, why in reads.items() if why.shapes}, inside=False)
        others = {n: str(why) for n, why in reads.items() if not any(_is_within(n, w) for w in whole)}
        return self.replaced(parts, others)

    @property
    def _reads_of_data(self) -> Mapping[str, ReadsData]:
        try:
            return reads_of_data(self.source)
        except Exception as error:
            raise CaptureError(
                f"the step cannot be run on tensors without data: {in_words(error, self.step.model)}"
            ) from error

    def _is_in_targets(self, name: str) -> bool:
        return any(_is_within(name, target) for target in self.step.targets)

    def may_help(self, name: str) -> bool:
        """Whether there is something to look into, and the user has not said that it stays as it is."""
        disabled = getattr(self.modules[name].forward, "_torchdynamo_disable", False)
        return not disabled and bool(self.inside(name))

    def without(
        self, parts: Parts | None, failed: Mapping[str, str], *, whole: frozenset[str] = frozenset()
    ) -> Parts:
        """`parts` less the modules because of which the targets `failed`; those in `whole` are not looked
        into."""
        parts = self.replaced(parts, {n: why for n, why in failed.items() if n in whole}, inside=False)
        guilty: dict[str, str] = {}
        level = {name: why for name, why in failed.items() if name not in whole}
        while level:
            suspects = {
                name: [n for n in self.inside(name) if n not in parts.excluded and self._is_suspect(n)]
                for name in level
            }
            found = self._try(parts, [n for names in suspects.values() for n in names])
            guilty |= {name: why for name, why in level.items() if not found.keys() & set(suspects[name])}
            level = found
        return self.replaced(parts, guilty)

    def replaced(self, parts: Parts | None, guilty: Mapping[str, str], *, inside: bool = True) -> Parts:
        """`parts` with the modules that each of the `guilty` calls in its place, or with nothing there."""
        parts = parts or Parts(targets=tuple(self.step.targets))
        targets = [name for name in parts.targets if name not in guilty]
        if not inside:
            targets = [name for name in targets if not any(_is_within(name, other) for other in guilty)]
        excluded = {**parts.excluded, **guilty}
        for name in guilty if inside else ():
            targets += [n for n in self._worth_compiling(name) if n not in targets and n not in excluded]
        return replace(parts, targets=tuple(targets), excluded=excluded)

    def _try(self, parts: Parts, names: list[str]) -> dict[str, str]:
        """Those of `names` that do not compile, each taken by itself."""
        if not names:
            return {}
        tried = replace(parts, targets=tuple(dict.fromkeys(names)))
        recorder = Recorder(measured_rates("cpu"), strictnesses=False)
        try:
            run = dry_step(self.source, recorder, options=self.options, parts=tried, warm_up_steps=0)
        except TargetsFailed as error:
            return error.reasons
        return dict.fromkeys(run.without_graph, _SKIPPED)

    def _is_suspect(self, name: str) -> bool:
        """Torch's own layers compile, unless somebody hung a hook on them."""
        module = self.modules[name]
        hooked = module._backward_hooks or module._backward_pre_hooks or module._forward_hooks
        return bool(hooked) or not _is_plain(module)

    def _worth_compiling(self, name: str) -> list[str]:
        """Modules that `name` calls and that may have something to recompute."""
        out = []
        for inner in self.inside(name):
            if not _is_plain(self.modules[inner]):
                out.append(inner)
        return out


def _is_within(name: str, other: str) -> bool:
    """Whether a module is another one, or inside of it, by their names."""
    return name == other or not other or name.startswith(f"{other}.")


def _is_plain(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None
