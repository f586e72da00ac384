from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dtr_integrations.config import DTRConfig
from dtr_integrations.errors import BudgetError, ConfigError


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "dtr.yaml"
    path.write_text(text)
    return path


def test_the_same_from_keywords_dict_and_yaml(tmp_path: Path) -> None:
    expected = DTRConfig(
        budget="70GB",
        targets=["encoder", "decoder"],
        reserve={"nccl": "1GB", "slack": "0B"},
        compile_options={"max_autotune": True},
        log_every_n_steps=10,
    )
    values: dict[str, Any] = {
        "budget": "70GB",
        "targets": ("encoder", "decoder"),
        "reserve": {"nccl": "1GB", "slack": "0B"},
        "compile_options": {"max_autotune": True},
        "log_every_n_steps": 10,
    }
    text = """
        budget: 70GB
        targets: [encoder, decoder]
        reserve: {nccl: 1GB, slack: 0B}
        compile_options: {max_autotune: true}
        log_every_n_steps: 10
    """
    path = yaml_file(tmp_path, text)
    for config in (
        DTRConfig.from_any(**values),
        DTRConfig.from_any(values),
        DTRConfig.from_any({"dtr": values, "other": 1}),
        DTRConfig.from_any(OmegaConf.create({**values, "targets": list(values["targets"])})),
        DTRConfig.from_any(path),
        DTRConfig.from_any(str(path)),
        DTRConfig.from_any(expected),
        DTRConfig.from_any(expected.to_dict()),
        pickle.loads(pickle.dumps(expected)),
    ):
        assert config == expected
        assert type(config.targets) is list
        assert type(config.compile_options) is dict


def test_defaults() -> None:
    config = DTRConfig.from_any(budget="auto")
    assert config.to_dict() == {
        "budget": "auto",
        "plan": None,
        "targets": None,
        "reserve": None,
        "fallback": "eager",
        "on_infeasible": "error",
        "mode": "schedule",
        "compile_options": {},
        "run_dir": None,
        "log_every_n_steps": 50,
        "progress": True,
        "verify": False,
    }


def test_keywords_replace_what_a_file_says(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "budget: 70GB\nreserve: {nccl: 1GB}\nmode: tags\n")
    config = DTRConfig.from_any(path, budget="60GB", reserve={"slack": "2GB"})
    assert (config.budget, config.reserve, config.mode) == ("60GB", {"slack": "2GB"}, "tags")


def test_a_section_of_somebody_elses_file(tmp_path: Path) -> None:
    path = yaml_file(
        tmp_path,
        "distributed_type: MULTI_GPU\nsize: 70\nbroken: ${nowhere}\ndtr:\n  budget: ${size}GB\n",
    )
    assert DTRConfig.from_any(path).budget == "70GB"


def test_interpolations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUDGET", "12.5GB")
    monkeypatch.setenv("EVERY", "7")
    monkeypatch.setenv("PROGRESS", "False")
    path = yaml_file(
        tmp_path,
        "budget: ${oc.env:BUDGET}\nlog_every_n_steps: ${oc.env:EVERY}\nprogress: ${oc.env:PROGRESS}\n",
    )
    config = DTRConfig.from_any(path)
    assert (config.budget, config.log_every_n_steps, config.progress) == ("12.5GB", 7, False)
    assert DTRConfig.from_any(budget="${oc.env:BUDGET}").budget == "12.5GB"
    monkeypatch.setenv("BUDGET", "12")
    with pytest.raises(BudgetError, match='did you mean "12GB"'):
        DTRConfig.from_any(path)
    monkeypatch.delenv("BUDGET")
    with pytest.raises(ConfigError, match="BUDGET"):
        DTRConfig.from_any(path)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [("70", "70"), ("70.5", "70.5"), ("true", "True"), ("70_000", "70000"), ("0.9", "0.9")],
)
def test_a_bare_number_in_yaml_is_not_made_text(tmp_path: Path, text: str, repeated: str) -> None:
    with pytest.raises(BudgetError, match=f"budget: cannot read {re.escape(repeated)} as") as caught:
        DTRConfig.from_any(yaml_file(tmp_path, f"budget: {text}\n"))
    assert isinstance(caught.value, ValueError)


WRONG_BUDGETS: list[Any] = [
    "70",
    70,
    True,
    "-1GB",
    "7 0GB",
    "lots",
    "110%",
    "nanGB",
    b"70GB",
    "",
    "0GB",
    [1],
    object(),
]


@pytest.mark.parametrize("value", WRONG_BUDGETS, ids=lambda value: repr(value)[:10])
def test_wrong_budgets_whatever_the_door(value: Any) -> None:
    for build in (
        lambda: DTRConfig(budget=value),
        lambda: DTRConfig.from_any(budget=value),
        lambda: DTRConfig.from_any({"budget": value}),
        lambda: DTRConfig.from_any({"dtr": {"budget": value}}),
    ):
        with pytest.raises(BudgetError, match=re.escape(repr(value))):
            build()


@pytest.mark.parametrize(
    "values", [{}, {"budget": None}, {"budget": "???"}, {"plan": "plan.json"}, {"dtr": {}}]
)
def test_a_missing_budget(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='no budget was given; pass budget="70GB"'):
        DTRConfig.from_any(values)
    with pytest.raises(ConfigError, match="no budget was given"):
        DTRConfig()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("bugdet", "budget"),
        ("target", "targets"),
        ("reserved", "reserve"),
        ("fall_back", "fallback"),
        ("compile_option", "compile_options"),
        ("log_every_n_step", "log_every_n_steps"),
        ("rundir", "run_dir"),
        ("Budget", "budget"),
    ],
)
def test_a_mistyped_key_suggests_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    message = f"unknown key '{key}'. Did you mean '{nearest}'?"
    for build in (
        lambda: DTRConfig.from_any(**{key: "70GB"}),
        lambda: DTRConfig.from_any({key: "70GB"}),
        lambda: DTRConfig.from_any(yaml_file(tmp_path, f"dtr:\n  {key}: 70GB\n")),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            build()


def test_a_key_that_is_near_nothing_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'\. There are: budget, plan, targets"):
        DTRConfig.from_any(budget="1GB", zzz=1)
    with pytest.raises(ConfigError, match="unknown key 1"):
        DTRConfig.from_any({"budget": "1GB", 1: 2})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fallback", "eagre", "fallback='eagre' is wrong: the choices are 'dtr', 'eager', 'error'; did you"),
        ("fallback", "eagre", "did you mean 'eager'?"),
        ("on_infeasible", "never", "the choices are 'error', 'best_effort'; choose, for example, on_in"),
        ("mode", 3, "the choices are 'schedule', 'tags'"),
        ("log_every_n_steps", "x", "log_every_n_steps='x' is wrong: it is not a whole number of 1 or more"),
        ("log_every_n_steps", 0, "log_every_n_steps=0"),
        ("log_every_n_steps", 2.0, "log_every_n_steps=2.0"),
        ("log_every_n_steps", True, "log_every_n_steps=True"),
        ("log_every_n_steps", "²", "log_every_n_steps='²'"),
        ("log_every_n_steps", None, "log_every_n_steps=None"),
        ("progress", "maybe", "progress='maybe' is wrong: it is not a truth value; write progress=True"),
        ("progress", 1, "progress=1"),
        ("targets", "encoder", "did you mean targets=['encoder']?"),
        ("targets", [], "it names no module"),
        ("targets", [1], "targets=[1] is wrong: it is not a list of module names"),
        ("plan", 5, "plan=5 is wrong: it is not a path"),
        ("plan", "", "plan='' is wrong"),
        ("run_dir", ["a"], "run_dir=['a']"),
        ("compile_options", "max_autotune", "compile_options='max_autotune' is wrong"),
        ("compile_options", {1: 2}, "compile_options={1: 2}"),
        ("reserve", 2, "reserve: cannot read 2 as a memory size: a bare number has no unit; did you mean"),
        ("reserve", 2, 'did you mean "2GB"?'),
        ("reserve", "10%", "reserve: cannot read '10%' as a memory size: a percentage"),
        ("reserve", {"ncl": "1GB"}, "reserve has no line 'ncl'. Did you mean 'nccl'?"),
        ("reserve", {"other": "1GB"}, "There are: nccl, context, workspace, fragmentation, slack."),
        ("reserve", {"nccl": 1}, "reserve.nccl: cannot read 1 as a memory size"),
        ("reserve", {"nccl": None}, "reserve.nccl: cannot read None"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_key_value_and_fix(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        DTRConfig.from_any(budget="1GB", **{key: value})
    with pytest.raises(ConfigError, match=re.escape(message)):
        DTRConfig(budget="1GB", **{key: value})


def test_paths_and_objects_pass(tmp_path: Path) -> None:
    marker = object()
    config = DTRConfig.from_any(budget="1GB", plan=tmp_path / "p.json", compile_options={"pass": marker})
    assert config.plan == str(tmp_path / "p.json")
    assert config.compile_options["pass"] is marker


def test_bytes_of_budget_and_reserve() -> None:
    config = DTRConfig.from_any(budget="90%", reserve={"nccl": "1.5GB", "slack": "0B"})
    assert config.budget_bytes(lambda: 1000) == 900
    assert config.reserve_bytes() == {"nccl": 1_500_000_000, "slack": 0}
    assert DTRConfig.from_any(budget="1GB", reserve="2 GiB").reserve_bytes() == 2_147_483_648
    assert DTRConfig.from_any(budget="1GB").reserve_bytes() == {}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration file 'absent\.yaml'$"):
        DTRConfig.from_any("absent.yaml")
    with pytest.raises(ConfigError, match='a budget is given by name: budget="70GB"'):
        DTRConfig.from_any("70GB")
    with pytest.raises(ConfigError, match="holds no keys"):
        DTRConfig.from_any(yaml_file(tmp_path, "- 1\n- 2\n"))
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        DTRConfig.from_any(yaml_file(tmp_path, "budget: [70GB\n"))
    with pytest.raises(ConfigError, match='section "dtr:" holds no keys'):
        DTRConfig.from_any(yaml_file(tmp_path, "dtr: 70GB\n"))
    with pytest.raises(ConfigError, match="no budget was given"):
        DTRConfig.from_any(yaml_file(tmp_path, ""))
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        DTRConfig.from_any(tmp_path)
    with pytest.raises(ConfigError, match="cannot read a configuration from 70, a int"):
        DTRConfig.from_any(70)


@pytest.mark.parametrize("choice", ["dtr", "eager", "error"])
def test_the_choices_of_the_fallback_are_taken_without_a_word(choice: str) -> None:
    assert DTRConfig.from_any(budget="1GB", fallback=choice).fallback == choice


def test_it_is_frozen_and_a_structured_config() -> None:
    config = DTRConfig(budget="1GB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = "2GB"  # type: ignore[misc]
    schema = OmegaConf.structured(DTRConfig)
    merged = OmegaConf.to_object(OmegaConf.merge(schema, {"budget": "2GB", "targets": ["a"]}))
    assert merged == DTRConfig(budget="2GB", targets=["a"])
