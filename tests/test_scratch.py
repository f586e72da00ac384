"""Memory that kernels take inside: what is said of a signature is what the real call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtr_integrations.capture.fake import FakeWorld
from dtr_integrations.capture.scratch import Scratch
from dtr_integrations.measure import call_peak_bytes, measure_step

_aten = torch.ops.aten


def test_a_short_call_is_measured_as_a_step_is() -> None:
    def call() -> torch.Tensor:
        return torch.ones(1000).sin().sum()

    assert call_peak_bytes(call) == measure_step(call, device="cpu").peak_bytes == 8000


def _convolution(groups: int) -> tuple[Any, tuple[Any, ...]]:
    image, kernel = torch.zeros(4, 16, 16, 16), torch.zeros(16, 16 // groups, 3, 3)
    return _aten.convolution.default, (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)


@pytest.mark.parametrize("groups", [1, 16])
def test_a_convolution_copies_into_its_own_layout(groups: int) -> None:
    func, args = _convolution(groups)
    held = measure_step(lambda: func(*args), device="cpu").peak_bytes
    with FakeWorld().active():
        func, fake_args = _convolution(groups)
        said = Scratch(call_peak_bytes).bytes_of("convolution", func, fake_args, {})
    assert said == held - args[0].nbytes > 0  # its result is as large as the image


def test_pointwise_ops_and_views_are_not_tried() -> None:
    def never(call: Any) -> int:
        raise AssertionError("was run")

    x, scratch = torch.ones(8, 8), Scratch(never)
    for func in (_aten.gelu.default, _aten.add.Tensor, _aten.t.default, _aten.sum.default):
        assert scratch.bytes_of(func.overloadpacket.__name__, func, (x, x)[:1], {}) == 0
    assert scratch.bytes_of("mm", _aten.mm.default, (x, x), {}) == 0
