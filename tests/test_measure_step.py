"""`measure_step`: exact byte counts of hand-made steps, and who else's profiler it leaves alone."""

import os

import pytest
import torch
import torch.autograd.profiler as autograd_profiler

from dtr_integrations.errors import ProfilerActive
from dtr_integrations.measure import StepPeak, measure_step

CPU = [torch.profiler.ProfilerActivity.CPU]


def floats(count):
    return torch.empty(count, dtype=torch.float32)


def nothing_is_recording():
    return not torch.autograd._profiler_enabled() and not autograd_profiler._is_profiler_enabled


def test_the_most_that_is_alive_at_once():
    def step():
        first = floats(1000)
        second = floats(500)
        del first
        third = floats(700)
        del second, third

    assert measure_step(step) == StepPeak(peak_bytes=6000, exact=True, source="cpu_profiler")


def test_a_step_without_a_tensor():
    assert measure_step(lambda: None).peak_bytes == 0


def test_what_the_first_run_leaves_alive_is_not_of_the_second():
    kept = []

    def step():
        if not kept:
            kept.append(floats(10_000))
        floats(100)

    assert measure_step(step).peak_bytes == 400
    assert len(kept) == 1


@pytest.mark.parametrize(("cleans_up", "peak_bytes"), [(True, 1600), (False, 1200)])
def test_what_a_cleanup_frees_counts_again(cleans_up, peak_bytes):
    gradients = []

    def step():
        activations = floats(300)
        gradients.clear()
        gradients.append(floats(100))
        del activations

    # Without a cleanup the old gradient, 400 B, lives before the step and dies in it.
    assert measure_step(step, cleanup=gradients.clear if cleans_up else None) == StepPeak(
        peak_bytes=peak_bytes, exact=True, source="cpu_profiler"
    )
    assert bool(gradients) is not cleans_up


def test_cycles_of_the_first_run_do_not_reach_into_the_second():
    class Node:
        pass

    def step():
        node = Node()
        node.itself = node
        node.tensor = floats(1000)

    assert [measure_step(step).peak_bytes for _ in range(3)] == [4000, 4000, 4000]


def test_a_block_from_before_that_dies_in_the_step_makes_it_an_upper_bound():
    blocks = [floats(1000), floats(1000)]

    def make():
        blocks[:] = [floats(1000), floats(1000)]

    measure_step(make)  # so that the profiler's own table knows the two that are alive now
    peak = measure_step(lambda: (blocks.pop(), floats(10)))
    assert peak == StepPeak(peak_bytes=40, exact=False, source="cpu_profiler")


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_exception_of_the_step_passes_and_leaves_no_profiler(fails_at):
    runs = []

    def step():
        runs.append(floats(10))
        if len(runs) == fails_at:
            raise KeyError("from the step")

    with pytest.raises(KeyError, match="from the step"):
        measure_step(step)
    assert nothing_is_recording()
    assert measure_step(lambda: floats(5)).peak_bytes == 20


def test_refused_inside_of_a_profiler_which_goes_on():
    runs = []
    with torch.profiler.profile(activities=CPU) as theirs:
        floats(1)
        with pytest.raises(ProfilerActive, match="recording on this thread"):
            measure_step(lambda: runs.append(1))
        assert torch.autograd._profiler_enabled()
        floats(2)
    assert not runs
    assert sum(event.name == "aten::empty" for event in theirs.events()) == 2


def test_refused_inside_of_itself():
    with pytest.raises(ProfilerActive):
        measure_step(lambda: measure_step(lambda: None))
    assert nothing_is_recording()


def test_refused_while_a_scheduled_profiler_waits_or_warms_up():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    counted = []
    with torch.profiler.profile(
        activities=CPU,
        schedule=schedule,
        on_trace_ready=lambda ready: counted.append(sum(e.name == "aten::empty" for e in ready.events())),
    ) as theirs:
        for _ in range(2):  # waits, then warms up
            with pytest.raises(ProfilerActive, match="between two recordings"):
                measure_step(lambda: None)
            theirs.step()
        floats(1)
        theirs.step()
    assert counted == [1]
    assert measure_step(lambda: floats(5)).peak_bytes == 20


@pytest.mark.skipif(torch.__version__ < "2.12", reason="there a profiler does not know that it was stopped")
def test_a_profiler_that_was_stopped_by_hand_is_no_obstacle():
    theirs = torch.profiler.profile(activities=CPU)
    theirs.start()
    theirs.stop()
    assert measure_step(lambda: floats(5)).peak_bytes == 20
    autograd_profiler.KinetoStepTracker.erase_step_count("ProfilerStep")


def test_a_step_with_a_profiler_of_its_own_keeps_it():
    profiles = []

    def step():
        with torch.profiler.profile(activities=CPU) as theirs:
            floats(1)
        profiles.append(theirs)

    with pytest.raises(ProfilerActive, match="of its own"):
        measure_step(step)
    assert sum(event.name == "aten::empty" for event in profiles[0].events()) == 1
    assert nothing_is_recording()


def test_other_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="device meta cannot be measured; supported are 'cpu' and 'cuda'"):
        measure_step(lambda: None, device="meta")


def test_the_environment_stays_as_it_was(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    measure_step(lambda: None)
    assert "KINETO_LOG_LEVEL" not in os.environ
