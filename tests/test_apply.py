"""A schedule is carried out to the letter: by extraction, by tags where tags can say it, from a file, from a
cache."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import train, worst
from models import GPT, ConvNet
from torch import nn

import dtr_integrations
from dtr_integrations._compat import CustomPartitionerFn, partitioners
from dtr_integrations.apply import registry
from dtr_integrations.apply.partitioner import PlanPartitioner
from dtr_integrations.apply.tags import expressible
from dtr_integrations.capture import dryrun
from dtr_integrations.capture.joint import is_replayable
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import Captured, capture, dry_step
from dtr_integrations.core.graph import JointGraph, OpKind, Phase
from dtr_integrations.core.plan import GraphSchedule, Plan, Recompute
from dtr_integrations.core.schedule import schedule_for, validate
from dtr_integrations.core.simulate import NO_CORRECTION
from dtr_integrations.errors import PlanMismatch
from dtr_integrations.pipeline import planned_partitioner
from dtr_integrations.planner import Problem, search

SMALL = {
    "gpt": (lambda: GPT(layers=3, width=64, length=64), lambda: torch.randint(0, 256, (4, 64))),
    "conv": (lambda: ConvNet(blocks=3, channels=8), lambda: torch.randn(4, 3, 16, 16)),
}
QUICK = ["gpt", pytest.param("conv", marks=pytest.mark.slow)]


@cache
def source_of(name: str) -> ModuleStep:
    torch.manual_seed(0)
    make, batch = SMALL[name]
    return ModuleStep(model=make(), args=(batch(),))


@cache
def captured_of(name: str) -> Captured:
    return capture(source_of(name))


@cache
def frontier_of(name: str) -> Any:
    step = captured_of(name).step
    return search(Problem(step=step, correction=NO_CORRECTION))


class Spy(CustomPartitionerFn):
    """Writes down the graphs that a partitioner returns."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.printed: list[str] = []
        self.saved: list[set[str]] = []

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = self.inner(gm, joint_inputs, **kwargs)
        self.printed += [str(forward.graph), str(backward.graph)]
        names = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
        self.saved.append({n for n in names if not n.startswith(("primals", "tangents"))})
        return forward, backward

    def uuid(self) -> Any:
        return "spy"


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_that_does_not_bind_leaves_torchs_graphs_as_they_are_node_by_node(name: str) -> None:
    torchs = Spy(partitioners.min_cut_rematerialization_partition)
    dry_step(source_of(name), torchs)
    plan = dtr_integrations.plan(source_of(name).model, source_of(name).args, budget="4GB")
    assert plan.is_default
    with planned_partitioner(plan.schedule, mode="schedule") as partitioner:
        ours = Spy(partitioner)
        dry_step(source_of(name), ours)
    assert ours.printed == torchs.printed


def in_tags(graph: JointGraph, schedule: GraphSchedule) -> GraphSchedule:
    """The nearest schedule that tags can say: bases in the place of views, nothing that serves the backward
    alone."""

    def base(index: int) -> int:
        op = graph.ops[index]
        return base(op.inputs[0]) if op.kind is OpKind.VIEW and "getitem" not in op.target else index

    bases = {base(i) for i in schedule.saved}
    kept = {i for i in bases if graph.ops[i].phase is Phase.FORWARD}
    parts = {u for i in kept if "getitem" in graph.ops[i].target for u in graph.users[graph.ops[i].inputs[0]]}
    return schedule_for(graph, kept | parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_tags_and_extraction_agree(name: str) -> None:
    (graph,) = captured_of(name).step.graphs
    points = [p for p in frontier_of(name).points if not p.is_default]
    assert len(points) >= 3
    for point in (points[0], points[len(points) // 2], points[-1]):
        schedule = in_tags(graph, point.schedules[0])
        assert expressible(graph, schedule)
        seen = {}
        for mode in ("schedule", "tags"):
            with planned_partitioner((schedule,), mode=mode) as partitioner:
                spy = Spy(partitioner)
                seen[mode] = dry_step(source_of(name), spy).profile.peak_bytes, spy.saved
        assert seen["schedule"] == seen["tags"]


def test_a_value_can_be_computed_twice() -> None:
    """What tags cannot say: a second copy of one value, for a later reader."""
    (graph,) = captured_of("gpt").step.graphs
    schedule = frontier_of("gpt").lowest.schedules[0]
    by_value = {r.value: r for r in schedule.recompute}
    available = {*schedule.saved, *(op.index for op in graph.ops if op.kind is OpKind.INPUT)}

    def late_readers(value: int) -> list[int]:
        return [
            u
            for u in graph.users[value]
            if graph.ops[u].phase is Phase.BACKWARD and u > by_value[value].before
        ]

    value = next(
        r.value
        for r in schedule.recompute
        if graph.ops[r.value].storages
        and available.issuperset(graph.ops[r.value].inputs)
        and late_readers(r.value)
    )
    again = Recompute(value=value, copy=1, before=late_readers(value)[-1])
    twice = replace(schedule, recompute=(*schedule.recompute, again))
    validate(graph, twice)
    assert not expressible(graph, twice)
    target = graph.ops[value].target.split(".")[1]
    assert _printed(twice).count(f"aten.{target}") == _printed(schedule).count(f"aten.{target}") + 1


def _printed(schedule: GraphSchedule) -> str:
    with planned_partitioner((schedule,), mode="schedule") as partitioner:
        spy = Spy(partitioner)
        dry_step(source_of("gpt"), spy)
    return spy.printed[1]


def tiny_run(**config: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, length=32)
    batch = torch.randint(0, 256, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    session = dtr_integrations.auto_checkpoint(model, optimizer=optimizer, **config) if config else None
    trained = train(
        model, optimizer, lambda: model(batch).square().mean(), session.step if session else lambda s: s()
    )
    if session is not None:
        session.close()
    return trained, session, model


@cache
def tiny_default() -> Any:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, length=32)
    batch = torch.randint(0, 256, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    model.compile(dynamic=False)
    return train(model, optimizer, lambda: model(batch).square().mean(), lambda step: step())


@cache
def tiny_plan() -> Plan:
    trained, session, _ = tiny_run(budget="4GB")
    default = session.plan
    share = default.static_bytes + (default.default_allocated_bytes - default.static_bytes) * 2 // 3
    trained, session, _ = tiny_run(budget=f"{share}B")
    assert worst(trained, tiny_default())[0] <= 1e-5
    return session.plan


def test_a_plan_file_is_used_as_it_is(tmp_path: Path) -> None:
    plan = tiny_plan()
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan
    _, session, _ = tiny_run(budget="4GB", plan=str(path))
    assert session.plan.digest == plan.digest
    assert session.plan.predicted_allocated_bytes == plan.predicted_allocated_bytes


def test_a_plan_for_another_model_or_an_edited_one_says_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(tiny_plan().to_json())
    model = nn.Linear(4, 4)
    with pytest.raises(PlanMismatch, match="another step"):
        dtr_integrations.plan(model, torch.randn(2, 4), budget="4GB", plan=str(path))
    edited = json.loads(tiny_plan().to_json())
    edited["schedule"][0]["saved"] = edited["schedule"][0]["saved"][1:]
    path.write_text(json.dumps(edited))
    with pytest.raises(PlanMismatch, match="edited"):
        dtr_integrations.plan(model, torch.randn(2, 4), budget="4GB", plan=str(path))
    with pytest.raises(PlanMismatch, match="nowhere"):
        dtr_integrations.plan(model, torch.randn(2, 4), budget="4GB", plan="nowhere.json")


def test_the_gate_sees_a_replay_with_another_dropout_mask(tmp_path: Path) -> None:
    """Seeds drawn again in the backward: what torch's own budget API does silently."""
    plan = tiny_plan()
    torch.manual_seed(0)
    graph = capture(
        ModuleStep(
            model=GPT(layers=2, width=32, length=32),
            args=(torch.randint(0, 256, (4, 32)),),
            loss_fn=lambda out: out.square().mean(),
        )
    ).step.graphs[0]
    seeds = {op.index for op in graph.ops if "inductor_seeds" in op.target}
    assert seeds
    careless = replace(graph, ops=tuple(replace(op, replayable=True) for op in graph.ops))
    readers = {i for i in range(len(graph.ops)) if seeds & _ancestors(graph, i)}
    saved = [i for i in plan.schedule[0].saved if i not in seeds | readers]
    wrong = replace(plan, schedule=(schedule_for(careless, saved),))
    assert seeds & {r.value for r in wrong.schedule[0].recompute}
    path = tmp_path / "wrong.json"
    path.write_text(wrong.to_json())
    trained, _, _ = tiny_run(budget="4GB", plan=str(path))
    error, where = worst(trained, tiny_default())
    assert error > 1e-2, where


def _ancestors(graph: Any, index: int) -> set[int]:
    seen: set[int] = set()
    todo = [index]
    while todo:
        i = todo.pop()
        if i not in seen:
            seen.add(i)
            todo += graph.ops[i].inputs
    return seen


class Noisy(nn.Module):
    """Two ops that draw from the generator as they run: a library kernel's mask, the seed of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.alpha_dropout(self.one(x).relu(), 0.1, self.training)
        return nn.functional.dropout(self.two(x).relu(), 0.5, self.training)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of the wrappers that dry runs execute, in order: forward, backward, ..."""
    sources: list[str] = []
    run_dry = dryrun.dry_call

    def noted(source: str, *args: Any) -> Any:
        sources.append(source)
        return run_dry(source, *args)

    monkeypatch.setattr(dryrun, "dry_call", noted)
    return sources


def test_ops_that_draw_from_the_generator_run_in_the_order_of_the_default(generated: list[str]) -> None:
    def order() -> list[str]:
        forward, _ = generated[-2:]
        return re.findall(r"aten\.(bernoulli_|randint)", forward)

    source = ModuleStep(model=Noisy(), args=(torch.randn(64, 32),))
    (graph,) = capture(source).step.graphs
    default = order()
    assert len(default) == len(graph.draws) == 2
    schedule = schedule_for(graph, ())
    for draws, expected in ((graph.draws, default), (graph.draws[::-1], default[::-1])):
        with planned_partitioner((replace(schedule, draws=draws),), mode="schedule") as partitioner:
            dry_step(source, partitioner)
        assert order() == expected


@pytest.mark.parametrize("after_another", [False, True])
def test_a_mask_is_drawn_with_the_layout_of_the_default(generated: list[str], after_another: bool) -> None:
    """In place, so in the order of its storage: laid out otherwise, other elements would be dropped. The
    second one waits for the first."""

    def strides() -> str:
        forward, _ = generated[-2:]
        *_, mask = re.findall(r"aten\.bernoulli_\.float\((\w+),", forward)
        return re.findall(rf"{mask} = empty_strided_cpu\(\([^)]*\), \(([^)]*)\)", forward)[0]

    first = [nn.Dropout2d(0.1)] if after_another else []
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *first, nn.AlphaDropout(0.1), nn.Conv2d(8, 4, 1))
    source = ModuleStep(model=model, args=(torch.randn(2, 4, 8, 8),))
    (graph,) = capture(source).step.graphs
    *others, draw = graph.draws
    assert len(others) == after_another
    assert strides() == str(draw.strides)[1:-1]
    contiguous, last = (512, 64, 8, 1), (512, 1, 64, 8)
    assert draw.strides in (contiguous, last)
    for wanted in (contiguous, last):
        schedule = replace(schedule_for(graph, ()), draws=(*others, replace(draw, strides=wanted)))
        with planned_partitioner((schedule,), mode="schedule") as partitioner:
            dry_step(source, partitioner)
        assert strides() == str(wanted)[1:-1]


def test_another_shape_later_in_the_run_is_planned_on_the_spot(caplog: pytest.LogCaptureFixture) -> None:
    plan = tiny_plan()
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, length=32)
    reference = GPT(layers=2, width=32, length=32)
    reference.load_state_dict(model.state_dict())
    reference.compile(dynamic=False)
    # A graph that an earlier run planned on the spot comes out of torch's cache without being planned again.
    uncached = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with uncached[0], uncached[1], dtr_integrations.auto_checkpoint(model, budget=f"{plan.budget_bytes}B"):
        for length in (32, 16):
            ids = torch.randint(0, 256, (4, length))
            grads = []
            with caplog.at_level(logging.WARNING, "dtr_integrations"):
                for one in (model, reference):
                    one.zero_grad()
                    torch.manual_seed(7)
                    one(ids).square().mean().backward()
                    grads.append([p.grad for p in one.parameters()])
            for ours, theirs in zip(*grads, strict=True):
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert sum("planned on the spot" in record.message for record in caplog.records) == 1


def test_modules_of_torch_itself_are_compiled_in_place_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    with dtr_integrations.auto_checkpoint(model, budget="4GB") as session:
        model(torch.randn(4, 8)).sum().backward()
        assert session.plan is not None
        assert len(session.plan.schedule) == 1
    assert model._compiled_call_impl is None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(
                lambda y, f=layer: torch.tanh(f(y)) * 2, x, use_reentrant=False
            )
        return x


def test_the_users_own_checkpointing_is_said_before_step_1_and_not_stacked() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(256, 64)
    reference = Checkpointed()
    reference.load_state_dict(model.state_dict())
    reference(x).square().mean().backward()
    with (
        dtr_integrations.auto_checkpoint(model, budget="4GB"),
        pytest.warns(dtr_integrations.errors.PlanWarning, match="checkpoints activations by itself"),
    ):
        model(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


def test_what_must_not_run_twice_is_never_replayed() -> None:
    """Collectives, routing decisions, ops with side effects or randomness of their own."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    c10d, aten = torch.ops._c10d_functional, torch.ops.aten
    never = [
        (c10d.all_reduce.default, (x, "sum", "0")),
        (c10d.wait_tensor.default, (x,)),
        (aten.topk.default, (x, 2)),
        (aten.sort.default, (x,)),
        (aten.nonzero.default, (x,)),
        (aten.add_.Tensor, (x, x)),
        (aten.rand_like.default, (x,)),
        (aten.native_dropout.default, (x, 0.5, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x, 0.5)),
        (torch.ops.higher_order.auto_functionalized, (aten.add_.Tensor,)),
    ]
    fine = [
        (aten.mm.default, (x, x)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x, 0.0, True)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (x, x, x)),
    ]
    assert [is_replayable(graph.call_function(target, args)) for target, args in never] == [False] * len(
        never
    )
    assert [is_replayable(graph.call_function(target, args)) for target, args in fine] == [True] * len(fine)


@pytest.mark.slow
def test_a_partitioner_that_outlives_its_session_falls_back_to_torchs() -> None:
    plan_id = registry.register(registry.Entry(decide=lambda joint, outputs, static: None))
    registry.unregister(plan_id)
    orphan, torchs = Spy(PlanPartitioner(plan_id, "x")), Spy(partitioners.min_cut_rematerialization_partition)
    dry_step(source_of("conv"), orphan)
    dry_step(source_of("conv"), torchs)
    assert orphan.printed == torchs.printed


_SECOND_PROCESS = """
import sys, torch
sys.path.insert(0, {tests!r})
from models import GPT
import dtr_integrations
torch.manual_seed(0)
model = GPT(layers=2, width=64, length=64)
ids = torch.randint(0, 256, (4, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget=sys.argv[1])
def step():
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()
for _ in range(3):
    session.step(step)
from torch._dynamo.utils import counters
print(session.reports[0].peak_allocated_bytes, session.plan.predicted_allocated_bytes,
      session.plan.default_allocated_bytes, session.plan.static_bytes,
      counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_warm_cache_never_serves_another_budgets_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = _SECOND_PROCESS.format(tests=str(Path(__file__).parent))

    def run(budget: str) -> list[int]:
        out = subprocess.run(
            [sys.executable, "-c", script, budget], check=True, capture_output=True, text=True, timeout=500
        )
        return [int(word) for word in out.stdout.split()]

    peak, predicted, default, static, _ = run("4GB")
    assert predicted == default
    assert abs(peak - predicted) <= 0.01 * (predicted - static)
    budget = static + (default - static) * 2 // 3
    tight, predicted, _, _, _ = run(f"{budget}B")
    assert tight <= budget < peak
    assert abs(tight - predicted) <= 0.01 * (predicted - static)
    again, _, _, _, hits = run(f"{budget}B")
    assert again == tight
    assert hits  # the cache was really warm
