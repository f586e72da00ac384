"""What a model's code can reach outside of its modules is found by the names in it, and put back."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import nn

from dtr_integrations._python_state import outside, preserved

COUNT = 0
WORDS: deque[str] = deque(["one"])
TABLE: dict[str, Any] = {"inner": {"list": [1, [2]]}, "array": np.arange(3), "tensor": torch.arange(3.0)}


class Made(OrderedDict):  # type: ignore[type-arg]
    """As transformers' table of activations: what it holds is not what it gives."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("nobody asked for this")


MADE = Made(a=1)


class Holder:
    """A plain object of the user's."""

    def __init__(self) -> None:
        self.value, self.next = 1, self


HOLDER = Holder()


def helper() -> None:
    global COUNT, NEW
    COUNT += 1
    NEW = COUNT
    WORDS.append("two")
    TABLE["inner"]["list"][1].append(3)
    TABLE["array"] += 1
    TABLE["tensor"].mul_(2)
    HOLDER.value += 1
    MADE["b"] = 2


class Model(nn.Module):
    kinds: Any = None

    def forward(self) -> None:
        type(self).kinds = type(self).seen = COUNT
        helper()


def test_all_of_it_is_put_back() -> None:
    model, words, tensor = Model(), WORDS, TABLE["tensor"]
    for _ in range(2):
        with preserved(model):
            model.forward()
            assert (COUNT, NEW, HOLDER.value, Model.kinds, list(MADE)) == (1, 1, 2, 0, ["a", "b"])
        assert (COUNT, HOLDER.value, Model.kinds, list(MADE)) == (0, 1, None, ["a"])
        assert not hasattr(Model, "seen")
        assert "NEW" not in globals()
        assert WORDS is words
        assert list(words) == ["one"]
        assert TABLE["inner"] == {"list": [1, [2]]}
        assert TABLE["array"].tolist() == [0, 1, 2]
        assert TABLE["tensor"] is tensor
        assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_modules_that_import_each_other_are_read_once() -> None:
    one, two = types.ModuleType("users_one"), types.ModuleType("users_two")
    source = "def run():\n    two.calls += 1\n    one.run\n"
    one.calls, two.calls = 0, 0
    one.two, two.one = two, one
    one.one, two.two = one, two
    sys.modules |= {"users_one": one, "users_two": two}
    try:
        exec(source, vars(one))
        places = outside(nn.Identity(), one.run)
        assert places["users_two.calls"].get() == 0
        with preserved(nn.Identity(), one.run):
            one.run()
            assert two.calls == 1
        assert two.calls == 0
    finally:
        del sys.modules["users_one"], sys.modules["users_two"]


def test_code_of_libraries_is_left_alone() -> None:
    assert outside(nn.Linear(2, 2)) == {}
