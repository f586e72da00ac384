"""`trace_step`: one step in the middle of somebody else's run, to the byte."""

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.autograd.profiler as autograd_profiler

from dtr_integrations.measure import measure_step, static_bytes, tensors_in, trace_step

CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """It may free what earlier tests left, which is in the record like every death in the process."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def floats(count):
    return torch.empty(count, dtype=torch.float32)


def nothing_is_recording():
    return not torch.autograd._profiler_enabled() and not autograd_profiler._is_profiler_enabled


# --- exact counts -----------------------------------------------------------------------------------------


def test_born_inside_plus_known():
    old = [floats(1000), floats(10)]
    with trace_step(known=old) as trace:
        first = floats(100)  # 4040 + 400
        del old[0]  # 440
        second = floats(500)  # 2440
        del second
    assert (trace.peak.known_bytes, trace.peak.peak_bytes, trace.peak.end_bytes) == (4040, 4440, 440)
    assert trace.peak.exact
    assert trace.peak.source == "cpu_profiler"
    assert [live for _, live in trace.peak.timeline] == [4040, 4440, 440, 2440, 440]
    assert trace.skipped is None
    del first


def test_a_known_block_that_dies_early_makes_room():
    old = [floats(1000)]
    with trace_step(known=old) as trace:
        old.clear()
        floats(900)
    assert trace.peak.peak_bytes == 4000


def test_an_older_block_that_is_not_known_never_counts():
    old = [floats(1000)]
    with trace_step() as trace:
        old.clear()
        floats(10)
    assert (trace.peak.known_bytes, trace.peak.peak_bytes, trace.peak.end_bytes) == (0, 40, 0)


def test_an_empty_step():
    old = floats(10)
    with trace_step(known=[old]) as trace:
        pass
    assert (trace.peak.peak_bytes, trace.peak.end_bytes, trace.peak.timeline) == (40, 40, ())


def test_a_known_storage_counts_once_and_until_its_last_view_dies():
    base = floats(1000)
    views = [base[:10], base[5:]]
    with trace_step(known=[base, *views]) as trace:
        del base
        floats(100)  # 4000 + 400
        views.clear()
        floats(50)
    assert (trace.peak.known_bytes, trace.peak.peak_bytes, trace.peak.end_bytes) == (4000, 4400, 0)


def test_a_known_storage_that_only_autograd_holds():
    x = torch.randn(100, requires_grad=True)
    y = x.exp()
    z = y.sum()
    with trace_step(known=[y]) as trace:
        del y
        floats(1000)  # 400 + 4000: the graph still holds y
        del z  # frees the graph
        floats(1000)
    assert [live for _, live in trace.peak.timeline] == [400, 4400, 400, 0, 4000, 0]


def test_the_trace_keeps_nothing_alive():
    old = floats(1000)
    trace = trace_step(known=[old])
    trace.open()
    del old
    floats(10)
    trace.close()
    assert (trace.peak.peak_bytes, trace.peak.end_bytes) == (4000, 0)


def test_opened_and_closed_by_hooks_one_step_after_another():
    old = floats(100)
    for _ in range(3):
        trace = trace_step(known=[old])
        trace.open()
        old = floats(100)  # the new one is there before the old one dies
        trace.close()
        trace.close()
        assert (trace.peak.known_bytes, trace.peak.peak_bytes, trace.peak.end_bytes) == (400, 800, 400)
        assert nothing_is_recording()


def test_the_timeline_is_cut_to_size_and_keeps_the_peak():
    with trace_step(timeline_points=7) as trace:
        for count in [*range(1, 40), 1000, *range(1, 40)]:
            floats(count)
    assert len(trace.peak.timeline) <= 7
    assert max(live for _, live in trace.peak.timeline) == trace.peak.peak_bytes == 4000


# --- what fools the profiler's own sums -------------------------------------------------------------------


# So large that malloc maps each anew (its threshold never passes 32 MiB), and the kernel gives the same hole
# out again. Never written to, so no page of it is ever there.
LARGE = 40_000_000


def a_block_in_a_stale_place():
    """LARGE - 10 bytes where the profiler's table still has a block of LARGE bytes."""
    misses = []
    for _ in range(20):
        with trace_step():
            tenant = torch.empty(LARGE, dtype=torch.uint8)
        address = tenant.data_ptr()
        del tenant  # unseen
        block = torch.empty(LARGE - 10, dtype=torch.uint8)
        if block.data_ptr() == address:
            return block
        misses.append(block)
    pytest.skip("this malloc does not give an address out again")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_stale_address_is_no_phantom(is_known):
    later = [a_block_in_a_stale_place()]
    with trace_step(known=later if is_known else []) as trace:
        held = torch.empty(500, dtype=torch.uint8)
        later.clear()  # torch reports the death of LARGE bytes
        more = torch.empty(600, dtype=torch.uint8)
    expected = (LARGE - 10, LARGE + 490, 1100) if is_known else (0, 1100, 1100)
    assert (trace.peak.known_bytes, trace.peak.peak_bytes, trace.peak.end_bytes) == expected
    assert trace.peak.exact
    del held, more


def test_torch_does_report_the_phantom():
    # Why the ledger goes by address. When this fails, torch has mended its table.
    later = [a_block_in_a_stale_place()]
    with torch.profiler.profile(activities=CPU, profile_memory=True) as theirs:
        later.clear()
    assert [event.cpu_memory_usage for event in theirs.events() if event.name == "[memory]"] == [-LARGE]


def test_a_death_on_a_thread_that_the_profiler_does_not_see_leaves_an_upper_bound():
    old = [floats(1000)]
    with trace_step(known=old) as trace:
        thread = threading.Thread(target=old.clear)
        thread.start()
        thread.join()
        floats(10)
    assert (trace.peak.peak_bytes, trace.peak.exact) == (4040, False)


def test_nothing_is_written_to_stderr(capfd):
    old = [floats(1000)]
    with trace_step(known=old):
        old.clear()  # c10 would warn of a block of unknown size
    assert capfd.readouterr() == ("", "")


def test_other_peoples_threads_do_not_count():
    with trace_step() as trace:
        thread = threading.Thread(target=lambda: floats(1000))
        thread.start()
        thread.join()
        floats(10)
    assert trace.peak.peak_bytes == 40


# --- other profilers, failures ----------------------------------------------------------------------------


def test_skipped_inside_of_a_profiler_which_goes_on():
    with torch.profiler.profile(activities=CPU) as theirs:
        with trace_step() as trace:
            floats(1)
        floats(2)
    assert trace.peak is None
    assert trace.skipped == "a torch profiler is recording on this thread"
    assert sum(event.name == "aten::empty" for event in theirs.events()) == 2


def test_gives_way_to_a_profiler_that_starts_inside_and_outlives_the_step():
    theirs = torch.profiler.profile(activities=CPU)
    with trace_step() as trace:
        floats(1)
        theirs.start()
        floats(2)
    assert trace.peak is None
    assert trace.skipped == "a torch profiler was started inside of the step"
    assert torch.autograd._profiler_enabled()
    floats(3)
    theirs.stop()
    assert sum(event.name == "aten::empty" for event in theirs.events()) == 2
    assert nothing_is_recording()
    autograd_profiler.KinetoStepTracker.erase_step_count("ProfilerStep")
    with trace_step() as trace:
        floats(1)
    assert trace.peak.peak_bytes == 4


def test_a_trace_inside_of_a_trace_is_skipped():
    with trace_step() as outer:
        floats(10)
        with trace_step() as inner:
            floats(20)
    assert inner.peak is None
    assert outer.peak.peak_bytes == 80


def test_a_failing_step_passes_its_exception_and_leaves_no_profiler():
    old = floats(10)
    with pytest.raises(KeyError, match="from the step"), trace_step(known=[old]) as trace:
        raise KeyError("from the step")
    assert nothing_is_recording()
    assert trace.peak is None
    assert autograd_profiler._prepare_profiler is torch.autograd._prepare_profiler
    assert autograd_profiler._enable_profiler is torch.autograd._enable_profiler


def test_other_devices_are_refused_by_name():
    with pytest.raises(ValueError, match="supported are 'cpu' and 'cuda'"):
        trace_step(device="meta")


# --- whole training steps ---------------------------------------------------------------------------------


ROWS = 1024  # so many that activations, not the optimizer's temporaries, make the peak


class Wave(torch.nn.Module):
    """Eager saves three values of it for the backward, a compiler one."""

    def forward(self, x):
        return x.sin().cos().tanh()


def mlp():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), Wave())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))


def as_lightning_does(model, forward, optimizer, batch):
    """Forward, then the old gradients go, then backward and the optimizer's step."""

    def step():
        loss = torch.nn.functional.mse_loss(forward(batch["x"]), batch["y"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def traced_and_measured(model, forward):
    batch = {"x": torch.randn(ROWS, 64), "y": torch.randn(ROWS, 8)}
    optimizer = torch.optim.AdamW(model.parameters())
    step = as_lightning_does(model, forward, optimizer, batch)
    step()  # makes the optimizer state
    with trace_step(known=[*gradients_of(model), *tensors_in(batch)]) as trace:
        step()
    # Without a cleanup the old gradients live before the second run, as the batch does.
    measured = measure_step(step)
    gradients_bytes = sum(gradient.nbytes for gradient in gradients_of(model))
    batch_bytes = ROWS * (64 + 8) * 4
    assert trace.peak.known_bytes == gradients_bytes + batch_bytes
    assert trace.peak.exact
    assert measured.exact
    # Gradients are there again at the end, the batch still is.
    assert trace.peak.end_bytes == gradients_bytes + batch_bytes
    return trace.peak, measured.peak_bytes + gradients_bytes + batch_bytes


def test_a_training_step_counts_as_in_the_protocol_of_two_runs():
    model = mlp()
    traced, measured_bytes = traced_and_measured(model, model)
    assert traced.peak_bytes == pytest.approx(measured_bytes, rel=0.001)


# torch's own, while Inductor is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_training_step_counts_as_in_the_protocol_of_two_runs():
    model = mlp()
    traced, measured_bytes = traced_and_measured(model, torch.compile(model))
    assert traced.peak_bytes == pytest.approx(measured_bytes, rel=0.001)
    eager_model = mlp()
    eager, _ = traced_and_measured(eager_model, eager_model)
    assert traced.peak_bytes < 0.7 * eager.peak_bytes


def test_the_state_that_an_optimizer_makes_in_its_first_step_counts_as_born_inside():
    model = mlp()
    batch = {"x": torch.randn(128, 64), "y": torch.randn(128, 8)}
    optimizer = torch.optim.AdamW(model.parameters())
    step = as_lightning_does(model, model, optimizer, batch)
    before_bytes = static_bytes(model, optimizer)
    with trace_step() as trace:
        step()
    state_bytes = static_bytes(model, optimizer) - before_bytes
    assert state_bytes == sum(2 * p.nbytes + 4 for p in model.parameters())
    gradients_bytes = sum(gradient.nbytes for gradient in gradients_of(model))
    assert trace.peak.end_bytes == state_bytes + gradients_bytes
