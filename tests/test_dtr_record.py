"""Logs of real training steps, and the format they are kept in."""

from __future__ import annotations

import gc
import gzip
from pathlib import Path

import pytest
import torch
from dtr_logs import logs
from dtr_models import MODELS
from hypothesis import given, settings

from dtr_integrations.dtr import read_log, replay, resolve, write_log
from dtr_integrations.dtr.oplog import Call, Constant, Mutate, Release, format_log, parse_log
from dtr_integrations.errors import OperatorLogError
from dtr_integrations.online.record import modelled_cost, record

LOGS = Path(__file__).parent / "data"


@settings(deadline=None, max_examples=50)
@given(log=logs())
def test_what_is_written_is_read_back(log: list) -> None:
    assert parse_log(format_log(log)) == log


def test_files_plain_and_gzipped(tmp_path: Path) -> None:
    log = read_log(LOGS / "gpt.log.gz")
    for name in ("a.log", "a.log.gz", "b.log.gz"):
        write_log(tmp_path / name, log)
        assert read_log(tmp_path / name) == log
    assert (tmp_path / "a.log.gz").read_bytes() == (tmp_path / "b.log.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.log.gz").read_bytes()) == (tmp_path / "a.log").read_bytes()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{", "}"], "line 1: not JSON"),
        (['{"INSTRUCTION": "FREE"}'], "line 1: unknown instruction 'FREE'"),
        (['{"INSTRUCTION": "COPY", "SRC": "a"}'], "line 1: KeyError: 'DST'"),
        (['{"INSTRUCTION": "CONSTANT", "NAME": "a"}'], "the file ends where a MEMORY"),
        (
            [
                '{"INSTRUCTION": "CONSTANT", "NAME": "a"}',
                '{"INSTRUCTION": "MEMORY", "NAME": "b", "MEMORY": "1"}',
            ],
            "line 2: expected the MEMORY line of a",
        ),
        (
            [
                '{"INSTRUCTION": "CONSTANT", "NAME": "a"}',
                '{"INSTRUCTION": "MEMORY", "NAME": "a", "MEMORY": "x"}',
            ],
            "line 2: ValueError",
        ),
    ],
)
def test_what_is_wrong_with_a_line(lines: list[str], message: str) -> None:
    with pytest.raises(OperatorLogError, match=message):
        parse_log(lines)


def test_what_is_wrong_with_a_name() -> None:
    with pytest.raises(OperatorLogError, match="'b', which has no tensor"):
        resolve([Constant("a", 1), Call("op", ["b"], ["c"], [1], [-1], 1)])
    with pytest.raises(OperatorLogError, match="the name a is given to a second tensor"):
        resolve([Constant("a", 1), Constant("a", 1)])
    with pytest.raises(OperatorLogError, match="a is released once too often"):
        resolve([Constant("a", 1), Release("a"), Release("a")])


@pytest.mark.parametrize("name", MODELS)
def test_the_committed_logs_go_under_a_budget(name: str) -> None:
    program = resolve(read_log(LOGS / f"{name}.log.gz"))
    result = replay(program, heuristic="h_dtr", budget_ratio=0.7, search="indexed")
    assert result.outcome == "ok"
    assert result.replays > 0
    assert result.peak_bytes <= int(0.7 * program.peak_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_a_recording_is_repeatable(name: str) -> None:
    """The same log each time, and every operator's cost in it."""
    log = record(MODELS[name](1), cost=modelled_cost)
    assert log == record(MODELS[name](1), cost=modelled_cost)
    program = resolve(log)
    assert program.operators > 100
    assert program.compute_ns == sum(i.time for i in log if isinstance(i, (Call, Mutate)))


def test_gradients_are_those_without_it_and_names_die_with_their_storages() -> None:
    def build() -> tuple[torch.nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return torch.nn.Sequential(*layers), torch.rand(16, 8)

    (plain, x), (seen, y), (first, z) = build(), build(), build()
    # What torch imports at its first operator under a mode holds on to that operator's arguments for a while.
    record(lambda: first(z).sum().backward())
    plain(x).sum().backward()
    gc.disable()
    try:
        log = record(lambda: seen(y).sum().backward())
    finally:
        gc.enable()
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), seen.buffers(), strict=True):
        assert torch.equal(one, other)
    released = {i.name for i in log if isinstance(i, Release)}
    made = [name for i in log if isinstance(i, Call) for name in i.results]
    sizes = {
        name: size for i in log if isinstance(i, Call) for name, size in zip(i.results, i.sizes, strict=True)
    }
    kept = [name for name in made if name not in released]
    assert sorted(sizes[name] for name in kept) == sorted(p.nbytes for p in seen.parameters())
    assert sum(i.size_bytes for i in log if isinstance(i, Constant)) >= sum(
        p.nbytes for p in seen.parameters()
    )
    assert any(isinstance(i, Mutate) and i.name.startswith("add_") for i in log), "num_batches_tracked"
    assert any(isinstance(i, Mutate) and i.name == "native_batch_norm" for i in log), "running statistics"


def test_views_are_the_storage_and_writes_keep_the_name() -> None:
    x = torch.rand(4, 6)

    def step() -> torch.Tensor:
        a = x * 2
        b = a.view(3, 8)
        b.add_(1)
        return b.sum()

    log = record(step, cost=lambda *_: 7)
    assert [i.name for i in log if isinstance(i, (Call, Mutate))] == ["mul.Tensor", "add_.Tensor", "sum"]
    (constant,) = [i for i in log if isinstance(i, Constant)]
    assert constant.size_bytes == 96
    assert resolve(log).compute_ns == 21
