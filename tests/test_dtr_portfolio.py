"""The choice of a policy on one recorded step, judged on steps that it has not seen."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from dtr_logs import authors_program
from dtr_models import MODELS

from dtr_integrations.dtr import HEURISTICS, Policies, Program, choose, read_log, replay, resolve
from dtr_integrations.dtr.portfolio import variants
from dtr_integrations.online.record import modelled_cost, record

LOGS = Path(__file__).parent / "data"


def recorded(model: str, seed: int) -> Program:
    """One step; another seed is another batch, another length, another tree. The same on every machine."""
    return resolve(record(MODELS[model](seed), cost=modelled_cost))


@pytest.mark.parametrize(
    ("model", "ratio"),
    [
        ("gpt", 0.5),
        ("resnet", 0.5),
        pytest.param("resnet", 0.35, marks=pytest.mark.slow),
        pytest.param("gpt", 0.35, marks=pytest.mark.slow),
        pytest.param("treelstm", 0.7, marks=pytest.mark.slow),
        pytest.param("lstm", 0.7, marks=pytest.mark.slow),
    ],
)
def test_as_good_as_the_best_single_heuristic_on_five_other_steps(model: str, ratio: float) -> None:
    choice = choose(recorded(model, 0), budget_ratio=ratio)
    for seed in range(1, 6):
        step = recorded(model, seed)
        chosen = replay(
            step,
            heuristic=choice.policies.heuristic,
            search="indexed",
            policies=choice.policies,
            budget_ratio=ratio,
        )
        singles = [replay(step, heuristic=key, search="indexed", budget_ratio=ratio) for key in HEURISTICS]
        assert chosen.outcome == "ok"
        assert chosen.slowdown <= min(r.slowdown for r in singles if r.outcome == "ok") + 0.01


@pytest.mark.parametrize("ratio", [0.4, 0.3])
def test_it_lives_on_the_u_net_where_h_dtr_eq_does_not(ratio: float) -> None:
    program = authors_program("unet-6")
    assert replay(program, budget_ratio=ratio).outcome == "oom"
    choice = choose(program, budget_ratio=ratio)
    result = replay(
        program, heuristic=choice.policies.heuristic, policies=choice.policies, budget_ratio=ratio
    )
    assert result.outcome == "ok"


def test_the_choice_and_its_reason_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    program = resolve(read_log(LOGS / "resnet.log.gz"))
    candidates = (Policies(heuristic="lru", search="indexed"), Policies(heuristic="msps", search="indexed"))
    with caplog.at_level(logging.INFO, logger="dtr_integrations"):
        choice = choose(program, budget_ratio=0.5, candidates=candidates)
    assert choice.policies.heuristic == "msps"
    assert choice.reason.startswith("msps: ×1.")
    assert "lru: fails in 3 of 3" in choice.reason
    assert choice.reason in caplog.text
    assert len(choice.trials) == 2


def test_several_logs_and_wrong_ones() -> None:
    programs = [resolve(read_log(LOGS / f"{name}.log.gz")) for name in ("resnet", "gpt")]
    choice = choose(programs, budget_ratio=0.6, candidates=variants(("h_dtr_eq",), minimum_bytes=1000))
    assert len(choice.trials) == 3
    assert len(choice.trials[0].results) == 6
    with pytest.raises(ValueError, match="at least one log"):
        choose([])
    with pytest.raises(ValueError, match="at least one log and one candidate"):
        choose(programs, candidates=())
