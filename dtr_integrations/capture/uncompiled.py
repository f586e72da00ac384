"""What the same step holds without torch.compile.

A compiled backward hands out all gradients of its parameters at once, at its end, and what it recomputes it
fuses as it sees fit; eager autograd adds up gradient by gradient and frees node by node. Where that is lower
than every plan, the user should hear of it (pytorch#120381).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .costs import measured_rates
from .scratch import Scratch
from .source import FakeStep, StepSource
from .step import Recorder, dry_step
from .world import World


@dataclass(frozen=True, kw_only=True)
class _Uncompiled:
    """A `StepSource` of which nothing is compiled."""

    source: StepSource

    def build(self, world: World) -> FakeStep:
        """See `StepSource.build`."""
        return replace(self.source.build(world), targets=())


def uncompiled_peak_bytes(source: StepSource, *, device: str = "cpu", scratch: Scratch | None = None) -> int:
    """The peak of the step when every module runs eagerly, static memory included, from a run on fake
    tensors.

    What eager kernels allocate inside of themselves is only counted as far as `scratch` knows it. Raises
    `CaptureError`.
    """
    recorder = Recorder(measured_rates(device), strictnesses=False)
    return dry_step(_Uncompiled(source=source), recorder, scratch=scratch).profile.peak_bytes
