"""The report of one measured step, its line in the log, and which steps get one."""

import dataclasses
import json
import subprocess
import sys

import pytest

from dtr_integrations.core.peak import PeakReport
from dtr_integrations.measure import PeakLog, is_measured, read_peak_log


def report(**changes):
    values = {
        "rank": 1,
        "world_size": 2,
        "step": 3,
        "budget_bytes": 1000,
        "predicted_allocated_bytes": 780,
        "peak_allocated_bytes": 800,
        "peak_reserved_bytes": None,
        "non_torch_bytes": None,
        "reserve_bytes": 0,
        "static_bytes": 300,
        "default_allocated_bytes": 1200,
        "plan_digest": "abc",
        "source": "cpu_profiler",
    }
    return PeakReport(**{**values, **changes})


def test_the_prediction_error_leaves_static_memory_out():
    assert report().prediction_error == 20 / 500
    assert report(predicted_allocated_bytes=900).prediction_error == 100 / 500
    assert report(predicted_allocated_bytes=None).prediction_error is None
    assert report(peak_allocated_bytes=300).prediction_error is None


@pytest.mark.parametrize(
    ("changes", "used", "within"),
    [
        ({}, 800, True),
        ({"peak_allocated_bytes": 1000}, 1000, True),
        ({"peak_allocated_bytes": 1001}, 1001, False),
        ({"peak_reserved_bytes": 900, "non_torch_bytes": 100}, 1000, True),
        ({"peak_reserved_bytes": 900, "non_torch_bytes": 101}, 1001, False),
    ],
)
def test_within_budget(changes, used, within):
    assert report(**changes).used_bytes == used
    assert report(**changes).within_budget is within


def test_a_line_has_exactly_the_fields_of_the_contract(tmp_path):
    log = PeakLog(tmp_path / "new" / "run", rank=1)
    log.append(report())
    lines = (tmp_path / "new" / "run" / "peaks-rank1.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == dataclasses.asdict(report())
    assert list(json.loads(lines[0])) == [
        "rank",
        "world_size",
        "step",
        "budget_bytes",
        "predicted_allocated_bytes",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "non_torch_bytes",
        "reserve_bytes",
        "static_bytes",
        "default_allocated_bytes",
        "plan_digest",
        "source",
    ]


def test_every_line_is_there_at_once_and_a_new_run_begins_anew(tmp_path):
    log = PeakLog(tmp_path, rank=0)
    for step in (2, 50, 100):
        log.append(report(step=step))
        assert read_peak_log(log.path)[-1] == report(step=step)
    assert [line.step for line in read_peak_log(log.path)] == [2, 50, 100]
    again = PeakLog(tmp_path, rank=0)
    assert len(read_peak_log(log.path)) == 3
    again.start()
    assert read_peak_log(log.path) == ()
    again.append(report(step=7))
    assert read_peak_log(log.path) == (report(step=7),)


@pytest.mark.parametrize("line", ['{"rank": 0}', "[1]", "not json"])
def test_a_line_that_is_no_report_is_named(tmp_path, line):
    log = PeakLog(tmp_path, rank=0)
    log.append(report())
    with log.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_peak_log(log.path)


def test_the_report_itself_needs_no_torch():
    code = "import sys, dtr_integrations.core.peak; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def measured_steps(count, every, fails=(), last_step=None):
    done = []
    for step in range(1, count + 1):
        if (
            is_measured(step, every=every, measured_so_far=len(done), last_step=last_step)
            and step not in fails
        ):
            done.append(step)
    return done


def test_the_second_step_then_every_nth():
    assert measured_steps(12, every=5) == [2, 5, 10]
    assert measured_steps(12, every=50) == [2]
    assert measured_steps(4, every=1) == [2, 3, 4]
    assert measured_steps(12, every=0) == [2]


def test_until_one_has_succeeded_each_is_tried():
    assert measured_steps(12, every=10, fails=(2,)) == [3, 10]
    assert measured_steps(12, every=10, fails=range(2, 8)) == [8, 10]


def test_a_run_of_one_step_has_only_that_one():
    assert measured_steps(1, every=50, last_step=1) == [1]
    assert measured_steps(3, every=50, last_step=3) == [2]


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="step is 0"):
        is_measured(0, every=1, measured_so_far=0)
    with pytest.raises(ValueError, match="every is -1"):
        is_measured(1, every=-1, measured_so_far=0)
