"""One check per configuration key: the value in its plain form, or an error that says what to write."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from .errors import BudgetError, ConfigError
from .units import check_budget, parse_bytes

RESERVE_LINES = ("nccl", "context", "workspace", "fragmentation", "slack")

_BOOLEANS = MappingProxyType({"true": True, "false": False, "1": True, "0": False})


def checked(key: str, value: Any) -> Any:
    """The value of `key` in its plain form.

    Raises:
        ConfigError: If the value is of the wrong kind, or none of the choices.
    """
    return _CHECKS[key](key, value)


def refuse_unknown_keys(given: Iterable[object], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first key that is not known, with the nearest that is."""
    known = list(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}. {_nearest(key, known)}")


def _nearest(word: object, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"There are: {', '.join(known)}."


def _refuse(key: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{key}={value!r} is wrong: {reason}; {remedy}")


def _budget(key: str, value: Any) -> str:
    if value is None or value == "???":  # OmegaConf's mark for a value that has yet to be given
        raise ConfigError('no budget was given; pass budget="70GB", "90%" or "auto"')
    try:
        check_budget(value)
    except BudgetError as error:
        raise BudgetError(f"{key}: {error}") from None
    return str(value)


def _path(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        _refuse(key, value, "it is not a path", f'write for example {key}="runs/{key}"')
    return str(os.fspath(value))


def _targets(key: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        _refuse(key, value, "it is one name, not a list of names", f"did you mean {key}=[{value!r}]?")
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        _refuse(
            key, value, "it is not a list of module names", f'write for example {key}=["encoder", "decoder"]'
        )
    if not value:
        _refuse(key, value, "it names no module", "leave it out for all that the step calls")
    return list(value)


def _reserve(key: str, value: Any) -> str | dict[str, str] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        for line in value:
            if line not in RESERVE_LINES:
                raise ConfigError(f"{key} has no line {line!r}. {_nearest(line, RESERVE_LINES)}")
        return {line: _size(f"{key}.{line}", size) for line, size in value.items()}
    return _size(key, value)


def _size(key: str, value: Any) -> str:
    try:
        parse_bytes(value)
    except BudgetError as error:
        raise BudgetError(f"{key}: {error}") from None
    return str(value)


def _options(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        _refuse(
            key, value, "it is not a mapping of names", f'write for example {key}={{"max_autotune": True}}'
        )
    return dict(value)


def _count(key: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        _refuse(key, value, "it is not a whole number of 1 or more", f"write for example {key}=50")
    return number


def _switch(key: str, value: Any) -> bool:
    switch = _BOOLEANS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(switch, bool):
        _refuse(key, value, "it is not a truth value", f"write {key}=True or {key}=False")
    return switch


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
            remedy = f"did you mean {close[0]!r}?" if close else f"choose, for example, {key}={choices[0]!r}"
            _refuse(key, value, f"the choices are {', '.join(map(repr, choices))}", remedy)
        return value

    return check


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "budget": _budget,
        "plan": _path,
        "targets": _targets,
        "reserve": _reserve,
        "fallback": _one_of("dtr", "eager", "error"),
        "on_infeasible": _one_of("error", "best_effort"),
        "mode": _one_of("schedule", "tags"),
        "compile_options": _options,
        "run_dir": _path,
        "log_every_n_steps": _count,
        "progress": _switch,
        "verify": _switch,
    }
)
