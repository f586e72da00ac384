"""The online runtime beyond one step's bits: errors, scopes, threads, what must not grow."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from dtr_models import KINDS, TreeLSTM, syntax_tree
from online_cases import CASES, mlp
from test_online_cases import build, outcome, peak_of, same
from torch import nn

from dtr_integrations import measure, online
from dtr_integrations.errors import BudgetError, OutOfBudget
from dtr_integrations.online.operators import kind_of
from dtr_integrations.online.record import modelled_cost

pytestmark = pytest.mark.usefixtures("one_thread")


def runtime(module: nn.Module, budget: int | str, **options: Any) -> online.DTR:
    return online.DTR(
        module, budget=budget if isinstance(budget, str) else f"{budget}B", cost=modelled_cost, **options
    )


def half(make: Any = mlp) -> int:
    peak, static = peak_of(make)
    return static + (peak - static) // 2


def plain(make: Any = mlp) -> list[torch.Tensor | None]:
    module, step = build(make)
    torch.manual_seed(1)
    return outcome(module, step())


def tables(dtr: online.DTR) -> tuple[int, ...]:
    """Sizes of everything that could grow."""
    inside = dtr._runtime
    cache = inside.cache
    search = cache.search
    return (
        len(inside.memory.slots),
        len(inside.memory.gone),
        len(cache.pool),
        len(cache.refused),
        len(cache._released_in_use),
        len(search._waiting),
        sum(map(len, search._heaps)),
        inside.memory.saved,
        cache.held_bytes,
    )


def test_a_budget_too_small_is_one_error_with_the_numbers_and_the_module_stays_usable() -> None:
    expected = plain()
    module, step = build(mlp)
    peak, static = peak_of(mlp)
    dtr = runtime(module, static + 65_536)
    with pytest.raises(OutOfBudget) as caught, dtr:
        step()
    error = caught.value
    assert error.operator
    assert error.needed_bytes > 0
    assert error.short_bytes == error.held_bytes + error.needed_bytes - error.budget_bytes > 0
    del caught, error
    gc.collect()
    module.zero_grad()
    torch.manual_seed(1)
    assert same(expected, outcome(module, step()))
    module.zero_grad()
    wide = runtime(module, half())
    torch.manual_seed(1)
    with wide:
        step()
    assert wide.stats.evictions > 0
    assert same(expected, outcome(module, None))
    # The one that failed, with room:
    dtr.budget_bytes = peak
    module.zero_grad()
    torch.manual_seed(1)
    with dtr:
        step()
    assert same(expected, outcome(module, None))
    assert dtr.stats.held_bytes == wide.stats.held_bytes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_step_leaves_everything_usable(where: str) -> None:
    expected = plain()
    module, step = build(mlp)
    dtr = runtime(module, half())
    with dtr:
        step()
    before = tables(dtr)

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    module.zero_grad()
    if where == "forward":
        hook = module[16].register_forward_hook(fail)
    else:
        hook = module[8].register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="mine"), dtr:
        step()
    hook.remove()
    gc.collect()
    module.zero_grad()
    torch.manual_seed(1)
    with dtr:
        step()
    assert same(expected, outcome(module, None))
    assert tables(dtr)[0] == before[0]
    assert dtr.stats.held_bytes == before[-1]


def test_what_is_no_budget() -> None:
    with pytest.raises(BudgetError, match="70"):
        online.DTR(nn.Linear(1, 1), budget="70")
    with pytest.raises(ValueError, match="heuristic must be one of"):
        online.DTR(nn.Linear(1, 1), budget="1GB", heuristic="h_none")


@pytest.mark.parametrize("heuristic", ["h_dtr", "h_local", "msps", "lru", "size", "random"])
def test_every_heuristic_gives_the_same_bits(heuristic: str) -> None:
    module, step = build(CASES["attention"])
    dtr = runtime(module, half(CASES["attention"]), heuristic=heuristic)
    torch.manual_seed(1)
    with dtr:
        step()
    assert dtr.stats.rematerialisations > 0
    assert same(plain(CASES["attention"]), outcome(module, None))


def test_calling_it_and_going_back_outside() -> None:
    """Forward in its scope, backward in none."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh())))
    x = torch.rand(512, 32)
    torch.manual_seed(1)
    net(x).square().mean().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    dtr = runtime(net, 1_200_000)
    torch.manual_seed(1)
    y = dtr(x)
    assert dtr.stats.evictions > 0
    loss = y.square().mean()
    loss.backward()
    assert dtr.stats.rematerialisations > 0
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.parameters(), strict=True))
    del y, loss
    with dtr:
        pass
    assert tables(dtr)[2:6] == (0,) * 4


def test_what_it_does_not_have_itself_is_the_modules() -> None:
    module, _ = build(mlp)
    dtr = runtime(module, "1GB")
    assert list(dtr.parameters()) == list(module.parameters())
    assert list(dtr.state_dict()) == list(module.state_dict())
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = dtr.missing


def test_an_inner_scope_does_nothing() -> None:
    module, step = build(mlp)
    outer, inner = runtime(module, half()), runtime(module, "1B")
    torch.manual_seed(1)
    with outer, inner, outer:
        step()
    assert same(plain(), outcome(module, None))
    assert inner.stats.peak_bytes == 0
    assert outer.stats.evictions > 0


def test_a_saved_tensor_that_was_written_to_is_an_error_as_ever() -> None:
    def step() -> None:
        y = x.exp()
        z = y.sum()
        y.mul_(2)
        z.backward()

    x = torch.rand(8, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        runtime(nn.Linear(1, 1), "1MB"),
    ):
        step()


def test_a_constant_written_to_in_the_scope_is_copied_first() -> None:
    def part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * 2  # needs x again if it is evicted, and does not save it
        return torch.stack([((h + i).exp() * w).tanh().sum() for i in range(6)]).sum()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = part(x, w)
        x.mul_(0.5)
        return first + part(x, w)

    results = []
    for budget in (None, "60KB"):
        torch.manual_seed(0)
        x, w = torch.rand(1000), torch.rand(1000, requires_grad=True)
        if budget is None:
            step(x, w).backward()
        else:
            dtr = runtime(nn.Linear(1, 1), budget)
            with dtr:
                step(x, w).backward()
            assert dtr.stats.rematerialisations > 0
        results.append((w.grad, x))
    (a, x), (b, y) = results
    assert torch.equal(a, b)
    assert torch.equal(x, y)


def test_a_constant_written_to_outside_of_the_scope_is_an_error_and_no_wrong_gradient() -> None:
    x, w = torch.rand(1000), torch.rand(1000, requires_grad=True)
    dtr = runtime(nn.Linear(1, 1), "45KB")
    with dtr:
        h = x * 2
        y = torch.stack([((h + i).exp() * w).tanh() for i in range(4)]).sum()
        del h
    assert dtr.stats.evictions > 0
    x.mul_(3)
    with pytest.raises(RuntimeError, match=r"modified in place outside of the scope \(shape \[1000\]"):
        y.backward()


def test_memory_filled_behind_the_dispatchers_back_is_never_computed_again() -> None:
    w = torch.rand(1000, requires_grad=True)
    data = torch.rand(1000)
    dtr = runtime(nn.Linear(1, 1), "40KB")
    with dtr:
        total = torch.zeros(())
        for make in (torch.empty, torch.zeros):
            filled = make(1000)
            filled.numpy()[:] = data.numpy()
            total = total + (filled * w).sum()
            del filled
        for _ in range(8):
            total = total + w.exp().tanh().sum()
        total.backward()
    again = w.detach().clone().requires_grad_()
    ((data * again).sum() + (data * again).sum() + sum(again.exp().tanh().sum() for _ in range(8))).backward()
    assert dtr.stats.evictions > 0
    assert torch.allclose(w.grad, again.grad)


def test_pieces_that_share_bytes_but_no_version_counter() -> None:
    def step(w: torch.Tensor) -> torch.Tensor:
        h = w
        for _ in range(6):
            a, b = (h * 1.1).unsafe_chunk(2)
            a = a.sigmoid_()  # b's bytes are next to it
            b = b.tanh_()
            h = torch.cat([a * b, a + b])
        return h.sum()

    torch.manual_seed(0)
    w = torch.rand(2000, requires_grad=True)
    step(w).backward()
    expected, w.grad = w.grad, None
    dtr = runtime(nn.Linear(1, 1), "64KB")
    with dtr:
        step(w).backward()
    assert dtr.stats.rematerialisations > 0
    assert torch.equal(expected, w.grad)


def test_a_long_chain_is_replayed_without_recursion() -> None:
    w = torch.full((256,), 0.5, requires_grad=True)
    depth = 3000

    def step() -> torch.Tensor:
        h = w
        for _ in range(depth):
            h = h.sin()
        return h.sum()

    step().backward()
    expected, w.grad = w.grad, None
    dtr = runtime(nn.Linear(1, 1), "100KB")
    with dtr:
        step().backward()
    assert dtr.stats.rematerialisations > depth / 2
    assert torch.equal(expected, w.grad)


def test_gradients_are_never_evicted_nor_computed_again() -> None:
    net = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(24, 24), nn.Tanh())), nn.Linear(24, 1))
    x = torch.rand(512, 24)
    dtr = runtime(net, 700_000)
    with dtr:
        gradients = torch.autograd.grad(net(x).square().mean(), list(net.parameters()), create_graph=True)
        copies = [gradient.detach().clone() for gradient in gradients]
        where = [gradient.data_ptr() for gradient in gradients]
        sum(gradient.square().sum() for gradient in gradients).backward()
        assert [gradient.data_ptr() for gradient in gradients] == where
        assert all(torch.equal(a, b) for a, b in zip(gradients, copies, strict=True))
    assert dtr.stats.evictions > 0


def test_two_threads_each_with_its_own_and_both_with_one() -> None:
    expected = plain()
    shared_module, _ = build(mlp)
    for one in (False, True):
        shared = runtime(shared_module, 3 * half())
        failures: list[Any] = []
        modules = [build(mlp) for _ in range(2)]

        def train(module: nn.Module, step: Any, dtr: online.DTR, failures: list[Any] = failures) -> None:
            try:
                for _ in range(5):
                    module.zero_grad()
                    with dtr:
                        step()
                    if not all(
                        torch.equal(e, p.grad) for e, p in zip(expected, module.parameters(), strict=False)
                    ):
                        failures.append("gradients")
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=train, args=(*pair, shared if one else runtime(pair[0], half())))
            for pair in modules
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("name", ["mlp", "views", "lstm_cell", "data_dependent"])
def test_the_profilers_peak_is_the_runtimes(name: str) -> None:
    """These models' operators have no scratch memory worth a word: the true peak is within the budget."""
    module, step = build(CASES[name])
    static = measure.static_bytes([module])
    free = measure.measure_step(step, cleanup=module.zero_grad).peak_bytes
    counted, _ = peak_of(CASES[name])
    outside = counted - static - free  # the batch: it lived before the measurement, and the ledger counts it
    assert outside >= -1000
    for share in (0.8, 0.6):
        budget = static + max(0, outside) + int(share * free)
        dtr = runtime(module, budget)

        def scoped(dtr: online.DTR = dtr) -> None:
            with dtr:
                step()

        peak = measure.measure_step(scoped, cleanup=module.zero_grad).peak_bytes
        assert dtr.stats.evictions > 0
        assert dtr.stats.peak_bytes <= budget
        assert peak + static + max(0, outside) <= budget + 4096


def test_nothing_grows_over_steps_with_changing_trees() -> None:
    torch.manual_seed(0)
    net = TreeLSTM(len(KINDS), 16, 64)
    trees = [syntax_tree(seed, 12) for seed in range(6)]
    dtr = runtime(net, "330KB")

    def train(tree: Any) -> None:
        net.zero_grad()
        with dtr:
            loss = nn.functional.cross_entropy(net.head(net(tree)[0]), torch.full((64,), tree[0]))
            loss.backward()

    for tree in trees:
        train(tree)
    gc.collect()
    gc.disable()
    try:
        seen = []
        for _ in range(3):
            for tree in trees:
                train(tree)
            seen.append(tables(dtr))
    finally:
        gc.enable()
    assert dtr.stats.evictions > 0
    assert seen[0] == seen[1] == seen[2]


def test_state_carried_from_step_to_step_has_no_history() -> None:
    cell = nn.GRUCell(8, 16)
    dtr = runtime(cell, "200KB")
    h = torch.zeros(64, 16)
    seen = []
    for _ in range(6):
        cell.zero_grad()
        with dtr:
            for _ in range(4):
                h = cell(torch.rand(64, 8), h)
            h.square().mean().backward()
            h = h.detach()
        seen.append(tables(dtr))
    assert seen[1] == seen[3] == seen[5]


def test_torch_func_inside() -> None:
    net, x = nn.Linear(8, 1), torch.rand(16, 8)

    def loss(values: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, values, (row,)).square().sum()

    values = dict(net.named_parameters())
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    expected = per_sample(values, x)
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    with runtime(net, "1MB"):
        found = per_sample(values, x)
        net(x).sum().backward()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable


def test_an_operator_of_ones_own_runs_once() -> None:
    calls = []

    @torch.library.custom_op("dtr_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    count.register_autograd(lambda ctx, grad: grad)
    w = torch.rand(1000, requires_grad=True)
    dtr = runtime(nn.Linear(1, 1), "50KB")
    with dtr:
        h = w
        for _ in range(3):
            h = count(h.exp().tanh()).tanh().sin()
        h.sum().backward()
    assert dtr.stats.rematerialisations > 0
    assert len(calls) == 3


def test_one_scope_over_many_steps() -> None:
    cell = nn.GRUCell(8, 16)
    optimizer = torch.optim.Adam(cell.parameters())
    dtr = runtime(cell, "150KB")
    h = torch.zeros(64, 16)
    seen = []
    with dtr:
        for _ in range(9):
            optimizer.zero_grad()
            for _ in range(6):
                h = cell(torch.rand(64, 8), h)
            h.square().mean().backward()
            optimizer.step()
            h = h.detach()
            h.add(0)  # the first operator after a backward takes stock
            seen.append((*tables(dtr)[:4], dtr.stats.held_bytes))
    assert dtr.stats.evictions > 0
    assert seen[2] == seen[5] == seen[8]


def test_an_operator_that_draws_and_does_not_say_so() -> None:
    make = CASES["dropout"]
    module, step = build(make)
    dtr = runtime(module, half(make))
    dropout = torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default
    for function in dropout:
        kind = kind_of(function)
        assert kind is not None
        assert kind.random
        kind.random = False
        dtr._runtime._kinds[id(function)] = kind
    torch.manual_seed(1)
    with dtr:
        step()
    assert dtr.stats.rematerialisations > 0
    assert same(plain(make), outcome(module, None))


@pytest.mark.filterwarnings("ignore")  # torch's own remarks on prototypes
def test_tensors_without_plain_bytes_pass_through() -> None:
    w = torch.rand(8, requires_grad=True)
    with runtime(nn.Linear(1, 1), "1MB"):
        nested = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.strided)
        doubled = nested * 2
        sparse = torch.eye(8).to_sparse() @ w[:, None]
        shapes = torch.empty(10**9, 8, device="meta") + 1
        quantized = torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8).dequantize()
        (sparse.sum() + quantized.sum()).backward()
    assert torch.equal(w.grad, torch.ones(8))
    assert shapes.shape == (10**9, 8)
    assert torch.equal(doubled[0], nested[0] * 2)


def test_the_random_states_that_are_kept_count() -> None:
    x = torch.rand(8, requires_grad=True)
    module = nn.Dropout(0.5)
    dtr = runtime(module, "1TB")
    kept = []
    with dtr:
        for _ in range(10):
            kept.append(module(x))
        held = dtr.stats.held_bytes
        kept.clear()
        dtr._runtime.settle()
        after = dtr.stats.held_bytes
    state = torch.get_rng_state().nbytes
    assert held - after >= 10 * state
    assert after < state
