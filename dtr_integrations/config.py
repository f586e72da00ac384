"""The one configuration that every front door takes: as keywords, a dict, or a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ._config_checks import checked, refuse_unknown_keys
from .errors import ConfigError
from .units import parse_budget, parse_bytes

__all__ = ["DTRConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTRConfig:
    """What the library is asked to do. Also an OmegaConf schema: ``OmegaConf.structured(DTRConfig)``.

    Front doors build it with `from_any`. Every instance has passed the checks, whichever way it was made.

    Raises:
        ConfigError: For a wrong key or value (a `ValueError`); the message names the key and a right value.
    """

    budget: str = MISSING
    """Total memory of one rank's device: ``"70GB"``, ``"65.2 GiB"``, ``"90%"`` of it or ``"auto"`` (all)."""

    plan: str | None = None
    """A plan file made earlier, used instead of searching; it must match the captured step."""

    targets: list[str] | None = None
    """Names of the modules to compile, as in ``model.named_modules()``. None: the outermost."""

    reserve: Any = None
    """Memory kept free for what torch does not allocate. None: modelled, then measured. A size (``"2GB"``)
    replaces the whole; a mapping replaces single lines: nccl, context, workspace, fragmentation, slack."""

    fallback: str = "eager"
    """For a module that does not compile: ``"dtr"`` (the online runtime, within what the rest leaves of the
    budget; it also takes modules that depend on data), ``"eager"`` (left alone, its memory counted) or
    ``"error"``."""

    on_infeasible: str = "error"
    """When no plan fits: ``"error"`` (`BudgetInfeasible`) or ``"best_effort"`` (the lowest, warned about)."""

    mode: str = "schedule"
    """``"schedule"``: graphs extracted directly from the plan. ``"tags"``: the plan as save/recompute tags
    for torch's own partitioner, kept as a baseline."""

    compile_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Passed to ``torch.compile(options=...)``."""

    run_dir: str | None = None
    """Where plan and peak logs are written. None: the logger's directory, or nowhere."""

    log_every_n_steps: int = 50
    """How often the peak is measured and logged, in optimizer steps. The first steps are always measured."""

    progress: bool = True
    """Show a progress line for whatever takes longer than a second."""

    verify: bool = False
    """Prove once, before the first step, that the plan changes nothing (see `dtr_integrations.verify`): a few
    steps on a copy of model and optimizer, several compiles. `VerificationFailed` if it does."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field.name, getattr(self, field.name)))

    @classmethod
    def from_any(cls, obj: object = None, /, **keywords: Any) -> DTRConfig:
        """Build a configuration from whatever a front door was given.

        Args:
            obj: None, a mapping, a `DTRConfig`, or the path of a YAML file. Where a mapping or file has a
                top-level ``dtr:`` section, that section is read and the rest is left to others.
            **keywords: Fields by name; each replaces the same field of `obj` as a whole.

        Values may be OmegaConf interpolations, such as ``${oc.env:BUDGET}``. Numbers and truth values that
        arrive as text, as they do from the environment, are converted; a `budget` without a unit never is.

        Raises:
            ConfigError: For an unreadable file, an unknown key or a wrong value (a `ValueError`).
        """
        values = {**_section(_opened(obj)), **_section(_as_omegaconf(keywords))}
        refuse_unknown_keys(values, [field.name for field in dataclasses.fields(cls)])
        return cls(**values)

    def budget_bytes(self, device_total_bytes: int | Callable[[], int]) -> int:
        """The budget in bytes; the device's total is asked for only where the budget is a share."""
        return parse_budget(self.budget, device_total_bytes=device_total_bytes)

    def reserve_bytes(self) -> int | dict[str, int]:
        """What the user fixed of the reserve, in bytes: the whole as an int, or the lines that were given."""
        if isinstance(self.reserve, str):
            return parse_bytes(self.reserve)
        return {line: parse_bytes(size) for line, size in (self.reserve or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, such as `from_any` reads."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _opened(obj: object) -> DictConfig:
    if obj is None:
        return _as_omegaconf({})
    if isinstance(obj, DTRConfig):
        return _as_omegaconf(obj.to_dict())
    if isinstance(obj, DictConfig):
        return obj
    if isinstance(obj, Mapping):
        return _as_omegaconf(obj)
    if isinstance(obj, str | os.PathLike):
        return _loaded(os.fspath(obj))
    raise ConfigError(
        f"cannot read a configuration from {obj!r}, a {type(obj).__name__}; "
        'pass a mapping, the path of a YAML file, or keywords such as budget="70GB"'
    )


def _as_omegaconf(mapping: Mapping[Any, Any]) -> DictConfig:
    try:
        # Objects pass through unread: a wrong one should reach the check of its key, which knows the remedy.
        return OmegaConf.create(dict(mapping), flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot read the configuration {dict(mapping)!r}: {error}") from error


def _loaded(path: str) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError as error:
        hint = "" if path.endswith((".yaml", ".yml")) else f'; a budget is given by name: budget="{path}"'
        raise ConfigError(f"there is no configuration file {path!r}{hint}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read the configuration file {path!r}: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f'the configuration file {path!r} holds no keys; write for example "budget: 70GB"')
    return loaded


def _section(config: DictConfig) -> dict[Any, Any]:
    """The library's own part as plain values. Interpolations see the whole file; the rest is not read."""
    own: Any = config
    if "dtr" in config:
        own = OmegaConf.select(config, "dtr")
        if not isinstance(own, DictConfig):
            raise ConfigError(
                f'the section "dtr:" holds no keys but {own!r}; write for example "dtr: {{budget: 70GB}}"'
            )
    try:
        return dict(OmegaConf.to_container(own, resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve the configuration: {error}") from error
