"""The public functions (design §11). Heavy imports wait until a function is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .capture.source import StepSource
    from .config import DTRConfig
    from .core.plan import Plan
    from .gate import VerifyReport
    from .planner import Frontier
    from .session import BudgetSession


def auto_checkpoint(
    model: nn.Module, *, budget: str, optimizer: torch.optim.Optimizer | None = None, **config: Any
) -> BudgetSession:
    """Keep the training of `model` under `budget`, in place.

        session = auto_checkpoint(model, optimizer=optimizer, budget="70GB")
        ...                       # train as before; or: session.step(one_whole_step)
        session.close()

    The module is compiled in place (`state_dict` keys do not change); the first training call plans, before
    it runs. Evaluation and `no_grad` calls run eagerly. In a process group every rank calls this: they begin
    together or not at all.

    Args:
        model: the module that the training loop calls.
        budget: total memory of this rank's device, e.g. ``"70GB"``, ``"65.2GiB"``, ``"90%"``, ``"auto"``.
        optimizer: counted into the plan (its state and its step).
        **config: fields of `DTRConfig`.

    Returns:
        A `BudgetSession`: `.plan`, `.report`, `.step(fn)`, `.close()`; also a context manager.

    Raises:
        ConfigError: a wrong key, value or budget (a `ValueError`).
        BudgetInfeasible: at the first training call, when no plan fits.
        RankFailed: there, when another rank cannot go on.
    """
    from .config import DTRConfig
    from .distributed import place_in_group
    from .own_loop import ModuleSession

    settings = DTRConfig.from_any(budget=budget, **config)
    _check_module(model)
    _check_optimizer(optimizer, model)
    rank, world_size = place_in_group()
    return ModuleSession(
        settings,
        model,
        optimizers=() if optimizer is None else (optimizer,),
        rank=rank,
        world_size=world_size,
    )


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: str,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    strategy: str | None = None,
    world_size: int = 1,
    device: str | torch.device | None = None,
    **config: Any,
) -> Plan:
    """Plan one training step of `model` without running it: what it needs, what it costs, whether it fits.

    Args:
        model: in training mode or not (it is planned as if training; the flag is left as it is).
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments, real or on the meta
            device.
        budget: as for `auto_checkpoint`.
        optimizer: its state and step are counted; None: no optimizer.
        loss_fn: scalar tensor of the model's output. None: the output's `.loss`, else the output if it is a
            scalar, else
            the mean of its first floating tensor in float32.
        strategy, world_size: one rank only in this version (`None`, 1).
        device: the device to plan for; default: the model's.
        **config: fields of `DTRConfig` (`plan=`, `targets=`, `reserve=`, `on_infeasible=`, `mode=`, ...).

    Returns:
        A certified `Plan` (bytes; `slowdown` a ratio).

    Raises:
        ConfigError, BudgetInfeasible, PlanMismatch, CaptureError.
    """
    from .distributed import reserve_for
    from .errors import PlanWarning
    from .pipeline import make_plan, silent
    from .session import read_plan, shown

    source, settings, place, budget_bytes = _question(
        model, example_inputs, budget, optimizer, loss_fn, strategy, world_size, device, config
    )
    planned = make_plan(
        source,
        budget_bytes=budget_bytes,
        reserve=reserve_for(place.type, budget_bytes, settings.reserve_bytes()),
        device=place.type,
        options=settings.compile_options,
        mode=settings.mode,
        best_effort=settings.on_infeasible == "best_effort",
        given=read_plan(settings.plan),
        progress=shown if settings.progress else silent,
    )
    for name, why in planned.captured.left_out.items():
        warnings.warn(
            f"torch.compile cannot take {name or type(model).__name__}: {why}. "
            "It is planned as running eagerly.",
            PlanWarning,
            stacklevel=2,
        )
    return planned.plan


def frontier(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    strategy: str | None = None,
    world_size: int = 1,
    device: str | torch.device | None = None,
    **config: Any,
) -> Frontier:
    """Every plan worth having: (peak bytes, slowdown), fastest to lowest. Arguments as for `plan`.

    `.points` ascend in bytes and descend in slowdown; `.at(budget_bytes)` is the fastest within that many
    bytes. Peaks are the search tier's; `plan` certifies the one it returns.
    """
    from .pipeline import make_frontier

    source, settings, place, budget_bytes = _question(
        model, example_inputs, budget, optimizer, loss_fn, strategy, world_size, device, config
    )
    return make_frontier(
        source, device=place.type, options=settings.compile_options, focus_bytes=budget_bytes
    )


def verify(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: str,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    steps: int = 3,
    **config: Any,
) -> VerifyReport:
    """Prove that a plan changes nothing, by training a few steps with and without it.

    Trained on copies of model and optimizer (which have to fit beside them): by the plan, by `torch.compile`
    alone from the same seed, and eagerly. Losses, every gradient, buffer, parameter, optimizer state, random
    state and the modules' Python state are compared. All real objects and random states stay as they are.

    Args:
        model, example_inputs, budget, optimizer, loss_fn: as for `plan`; the inputs are real.
        steps: optimizer steps to train.
        **config: fields of `DTRConfig`.

    Returns:
        A `VerifyReport`: `.ok`, `.rows` (worst first); as text a table with the tolerances and their reason.

    Raises:
        ConfigError, BudgetInfeasible, PlanMismatch; CaptureError also when the step cannot be run on copies.
    """
    import dataclasses

    from .errors import ConfigError
    from .session import BudgetSession

    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps={steps!r} is no whole number of 1 or more; write for example steps=3")
    source, settings, place, _ = _question(
        model, example_inputs, budget, optimizer, loss_fn, None, 1, None, config
    )
    session = BudgetSession(
        dataclasses.replace(settings, fallback="error", run_dir=None, verify=False),
        model,
        optimizers=() if optimizer is None else (optimizer,),
        device=place,
    )
    with session:
        session.prepare(source)
        return session.verify(source, steps=steps)


def _question(
    model: Any,
    example_inputs: Any,
    budget: str,
    optimizer: Any,
    loss_fn: Any,
    strategy: str | None,
    world_size: int,
    device: Any,
    config: dict[str, Any],
) -> tuple[StepSource, DTRConfig, torch.device, int]:

    from .capture.source import ModuleStep, split_inputs
    from .config import DTRConfig
    from .errors import ConfigError
    from .measure import device_total_bytes
    from .own_loop import target_modules

    settings = DTRConfig.from_any(budget=budget, **config)
    _check_module(model)
    _check_optimizer(optimizer, model)
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"loss_fn={loss_fn!r} is no function; pass one of the model's output, or leave it out"
        )
    targets = tuple(settings.targets or ("",))
    target_modules(model, targets)
    if strategy is not None or world_size != 1:
        raise ConfigError(
            f"strategy={strategy!r}, world_size={world_size!r}: this version plans one rank "
            "(strategy=None, world_size=1)"
        )
    place = _device(device, model)
    budget_bytes = settings.budget_bytes(lambda: device_total_bytes(place))
    args, kwargs = split_inputs(example_inputs)
    source = ModuleStep(
        model=model,
        args=args,
        kwargs=kwargs,
        optimizer=optimizer,
        loss_fn=loss_fn,
        targets=targets,
    )
    return source, settings, place, budget_bytes


def _check_module(model: Any) -> None:
    import torch

    from .errors import ConfigError

    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise ConfigError(
            "the model is wrapped by torch.compile already; pass the module itself (model._orig_mod)"
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model is {type(model).__name__}, not a torch.nn.Module")


def _check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    import torch

    from .errors import ConfigError

    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={optimizer!r} is no torch.optim.Optimizer; pass one, or leave it out")
    if optimizer is None:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if stepped and stepped.isdisjoint(map(id, model.parameters())):
        raise ConfigError(
            f"optimizer= steps no parameter of {type(model).__name__}: it was made for another model, or "
            "before the parameters were replaced; make it from model.parameters()"
        )


def _device(device: Any, model: torch.nn.Module) -> torch.device:
    import torch

    from .errors import ConfigError

    if device is None:
        place = next((p.device for p in model.parameters()), torch.device("cpu"))
        return place if place.type != "meta" else torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'device={device!r} is no device; for example "cpu" or "cuda:0"') from error
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device={device!r} is not there; this version plans for the CPU or a CUDA device")
    return place
