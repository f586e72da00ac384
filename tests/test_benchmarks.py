"""The benchmark recipes: how a comparison is judged, and each of them once in its small mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "recipes" / "benchmarks"


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    for folder in (ROOT / "recipes", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))


def point(name, peak, ratio, *, modelled=1.0, high=None, ours=False, predicted=None):
    from side_by_side import Point

    return Point(
        name=name, ours=ours, budget_bytes=peak if ours else None, predicted_bytes=predicted or peak,
        peak_bytes=peak, modelled=modelled, ratio=ratio, ratio_95=(ratio, high or ratio),
    )  # fmt: skip


def test_a_peer_is_beaten_at_or_under_its_peak_only():
    from frontier import judged

    found = judged(
        [
            point("low", 60, 1.30, modelled=1.3),
            point("middle", 100, 1.10, modelled=1.1),
            point("ours 70", 70, 1.20, modelled=1.2, ours=True),
            point("ours 100", 100, 1.05, high=1.15, modelled=1.09, ours=True, predicted=99),
        ]
    )
    low, middle = found["against"]
    assert (low["ours"], low["measured_ok"], low["modelled_ok"]) == (None, False, False)
    assert (middle["ours"], middle["measured_ok"], middle["modelled_ok"]) == ("ours 100", False, True)
    assert found["lowest_bytes"] == {"ours": 70, "peers": 60}
    assert found["over_budget"] == []
    assert found["prediction_error"] == pytest.approx(0.01)


def test_rank_correlation():
    from frontier import rank_correlation

    same = [point(str(i), 1, 1 + i / 10, modelled=1 + i / 5, ours=True) for i in range(4)]
    turned = [point(str(i), 1, 2 - i / 10, modelled=1 + i / 5, ours=True) for i in range(4)]
    assert rank_correlation(same) == 1
    assert rank_correlation(turned) == -1
    assert rank_correlation(same[:2]) is None


def test_budgets_are_what_peers_reach_and_what_fills_up():
    from frontier import budgets_of

    peers = [point("a", 150, 1.0), point("b", 300, 1.0)]
    assert budgets_of(peers, (100, 200), 3) == [200, 150, 100]


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_frontier(tmp_path: Path) -> None:
    options = ("--small", "--pairs", "3", "--budgets", "3", "--ratios", "0.5", "--out", str(tmp_path))
    run("frontier.py", "conv", *options)
    found = json.loads((tmp_path / "conv.json").read_text())
    assert not [p["error"] for p in found["points"] if p["error"]]
    assert not found["over_budget"]
    assert found["prediction_error"] < 0.005
    assert found["lowest_bytes"]["ours"] <= found["lowest_bytes"]["peers"]
    assert all(row["modelled_ok"] is not False for row in found["against"])
    ours = [p for p in found["points"] if p["ours"]]
    assert len(ours) >= 3
    assert all(p["gradients"] <= 1e-5 for p in ours)
    assert (tmp_path / "conv.svg").stat().st_size > 1000


@pytest.mark.slow
def test_gpu_truth_on_cpu(tmp_path: Path) -> None:
    run("gpu_truth.py", "--device", "cpu", "--small", "--pairs", "3", "--out", str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    points = json.loads(file.read_text())["points"]
    assert not [p["error"] for p in points if p["error"]]
    ours = [p for p in points if p["ours"]]
    assert len(ours) == 3
    assert all(p["peak_bytes"] <= p["budget_bytes"] for p in ours)
    assert all(abs(p["peak_bytes"] - p["predicted_bytes"]) <= 0.005 * p["peak_bytes"] for p in ours)


@pytest.mark.slow
def test_planning(tmp_path: Path) -> None:
    run("planning.py", "tiny", "--json", str(tmp_path / "rows.json"))
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["lowest_bytes"] < row["predicted_bytes"] <= row["budget_bytes"] < row["default_bytes"]
