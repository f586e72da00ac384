"""Which optimizer steps are measured. Measuring costs 15 to 25 % of a step on CPU, so not all are."""

from __future__ import annotations

__all__ = ["is_measured"]


def is_measured(step: int, *, every: int, measured_so_far: int, last_step: int | None = None) -> bool:
    """Whether optimizer step `step` is measured.

    The first is not: it makes the optimizer state and compiles, so it is no steady state. From the second on,
    each is tried until one has succeeded (a step is skipped while a profiler of the user's is active), so
    that the prediction is checked early; then every `every`-th.

    Args:
        step: number of the optimizer step about to run, counted from 1.
        every: the run's `log_every_n_steps`; 0 for no more than the first measurement.
        measured_so_far: how many steps of this run have been measured.
        last_step: number of the run's last optimizer step, where it is known; a run of one step has only that
            one.

    Raises:
        ValueError: `step` below 1, or a negative count.
    """
    if step < 1:
        raise ValueError(f"step is {step}; optimizer steps count from 1")
    if every < 0 or measured_so_far < 0:
        raise ValueError(f"every is {every} and measured_so_far {measured_so_far}; neither can be negative")
    if step == 1:
        return last_step == 1
    if measured_so_far == 0:
        return True
    return every > 0 and step % every == 0
