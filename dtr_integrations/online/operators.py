"""What the online runtime has to know of an operator: what it writes, and whether it can be run again."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OperatorKind", "kind_of"]

# Write to arguments without saying so in their schema.
_UNDECLARED: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::rrelu_with_noise": (1,),
}
# Running statistics, arguments 3 and 4, are written in training and read in evaluation: the position of that
# flag; None where it is always training. What comes out in training does not depend on them.
_STATISTICS: dict[str, int | None] = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::batch_norm_with_update": None,
    "aten::_batch_norm_with_update": None,
}
# Write every element of their target and read none.
_OVERWRITES = {
    f"aten::{name}"
    for name in (
        "bernoulli_",
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "zero_",
        "fill_",
        "copy_",
        "rrelu_with_noise",  # the noise
    )
}
# Memory that the program may fill by ways that no dispatcher sees (`tensor.numpy()[...] = `).
_BLANK = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
}
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]", "List[number]", "List[float]")
# Keep random state of their own.
_STATEFUL = ("aten::_cudnn_rnn", "aten::_cudnn_init_dropout_state", "aten::miopen_rnn")
# Change what a tensor's storage is, not only what is in it.
_RESHAPING = {f"aten::{name}" for name in ("resize_", "resize_as_", "set_", "set_data", "swap_")}


class OperatorKind:
    """One overload of an operator.

    Attributes:
        name: for messages.
        untracked: touches no tensor's bytes (views), or returns none and writes none: nothing to account.
        replayable: gives the same bits when it is run again on the same bytes and random state.
        random: draws random numbers.
        writes: (position, name) of the arguments that it writes to.
        statistics: whether two of them are running statistics; see `updates_statistics`.
        reshapes: changes what a tensor's storage is, or its size.
        overwrites: every element of its target is written and none read.
        factory: makes tensors from none.
        numbers: positions and names of arguments that are plain numbers: no size follows from them.
    """

    __slots__ = (
        "factory",
        "name",
        "numbers",
        "overwrites",
        "random",
        "replayable",
        "reshapes",
        "statistics",
        "training",
        "untracked",
        "writes",
    )

    def __init__(self, function: Any) -> None:
        schema = function._schema
        name = schema.name
        self.name = str(function.name()).removeprefix("aten::")
        undeclared = _UNDECLARED.get(name, ())
        self.writes = tuple(
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if index in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
        )
        if name.startswith("c10d"):
            self.writes = tuple((index, argument.name) for index, argument in enumerate(schema.arguments))
        self.statistics = name in _STATISTICS
        self.training = _STATISTICS.get(name)
        returns = schema.returns
        tensors = [r for r in returns if "Tensor" in str(r.type)]
        is_view = bool(tensors) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in tensors
        )
        self.untracked = not self.writes and (is_view or not tensors)
        self.random = torch.Tag.nondeterministic_seeded in function.tags
        self.factory = not any("Tensor" in str(argument.type) for argument in schema.arguments)
        self.numbers: frozenset[int | str] = frozenset()
        if not self.factory:
            plain = [(i, a.name) for i, a in enumerate(schema.arguments) if str(a.type) in _NUMBERS]
            self.numbers = frozenset(entry for pair in plain for entry in pair)
        self.overwrites = name in _OVERWRITES
        self.reshapes = name in _RESHAPING or "out" in schema.overload_name
        self.replayable = (
            name.startswith(("aten::", "prims::"))
            and name not in _BLANK
            and name not in _STATEFUL
            and not self.reshapes
            and not (self.factory and not self.random)
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of the arguments that a call writes to."""
        if self.statistics and not self.updates_statistics(args):
            return []
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]

    def updates_statistics(self, args: tuple[Any, ...]) -> bool:
        """Whether a call writes running statistics, arguments 3 and 4, on which its outputs do not depend."""
        return self.statistics and (self.training is None or bool(args[self.training]))


def kind_of(function: Any) -> OperatorKind | None:
    """What `function` is; None for what is no operator with a schema (higher-order operators)."""
    return OperatorKind(function) if isinstance(function, torch._ops.OpOverload) else None
