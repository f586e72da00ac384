"""Memory that kernels take inside: what is said of a signature is what the real call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

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


KERNELS = {
    "convolution": lambda x: F.conv2d(x, x.new_ones(8, 8, 3, 3), padding=1),
    "transposed convolution": lambda x: F.conv_transpose2d(x, x.new_ones(8, 4, 2, 2), stride=2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "logsumexp": lambda x: x.logsumexp(-1),
    "bernoulli": lambda x: x.new_full((64, 64), 0.5).bernoulli(),
    "a number among the operands": lambda x: x * 2 - 0.5,
    "mean": lambda x: x.mean(),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_library_kernel_holds_in_the_dry_run_what_it_really_holds(name: str) -> None:
    kernel, real = KERNELS[name], torch.ones(4, 8, 16, 16)
    world = FakeWorld(Scratch(call_peak_bytes))
    with torch.no_grad():
        measured = measure_step(lambda: kernel(real), device="cpu")
        with world.active():
            fake = torch.empty(4, 8, 16, 16)
            world.ledger.restart()
            before = world.ledger.live_bytes
            kernel(fake)
    assert world.ledger.peak_bytes - before == measured.peak_bytes


def test_numbers_that_autograd_keeps_count_to_the_end_of_the_step() -> None:
    world = FakeWorld()
    with world.active():
        x = torch.ones(16, requires_grad=True)
        before = world.ledger.live_bytes
        for _ in range(3):
            (x * 2).sum()
        assert world.ledger.live_bytes == before + 3 * 8
        world.counter.forget_numbers()
        assert world.ledger.live_bytes == before
