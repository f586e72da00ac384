"""`accelerate launch --config dtr.yaml train.py`: the launcher's command line and every other one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dtr_integrations import _autoload
from dtr_integrations._autoload import CONFIG, split_section, without_section
from dtr_integrations.config import DTRConfig

PLAIN = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n"
WITH_SECTION = f"# ours\ndtr:\n  budget: 70GB\n\n  # a comment\n  targets: [encoder]\n{PLAIN}"


@pytest.mark.parametrize(
    ("text", "section"),
    [
        (WITH_SECTION, {"budget": "70GB", "targets": ["encoder"]}),
        (f"dtr: {{budget: 70GB}}\n{PLAIN}", {"budget": "70GB"}),
        (f"{PLAIN}'dtr':\n    budget: 70GB", {"budget": "70GB"}),
        (f"{PLAIN}dtr:\n# a comment in the first column\n  budget: 70GB\n", {"budget": "70GB"}),
        (f"dtr :\r\n  budget: 70GB\r\n{PLAIN}", {"budget": "70GB"}),
    ],
)
def test_the_section_is_taken_out(text: str, section: object) -> None:
    own, rest = split_section(text)
    assert yaml.safe_load(own) == {"dtr": section}
    assert yaml.safe_load(rest) == yaml.safe_load(PLAIN)


@pytest.mark.parametrize(
    "text", [PLAIN, "", "dtr_other: 1\n", "nested:\n  dtr:\n    budget: 70GB\n", "- dtr\n", "# dtr:\n"]
)
def test_without_a_section_nothing_is_taken(text: str) -> None:
    assert split_section(text) == ("", text)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "dtr.yaml"
    path.write_text(WITH_SECTION)
    return path


@pytest.mark.parametrize("form", ["--config {}", "--config={}", "--config_file {}", "--config_file={}"])
@pytest.mark.parametrize("before", ["", "--num_processes 2 --cpu", "--mixed_precision=bf16 --debug"])
@pytest.mark.parametrize("after", ["train.py --config mine.yaml -m", "-m package.train --config mine.yaml"])
def test_the_launchers_arguments_are_rewritten_and_not_the_scripts(
    config: Path, form: str, before: str, after: str
) -> None:
    environment: dict[str, str] = {}
    arguments = [*before.split(), *form.format(config).split(), *after.split()]
    new = without_section(arguments, environment)
    at = len(before.split())
    assert new[:at] == before.split()
    assert new[at] == "--config_file"
    assert new[at + 2 :] == after.split()
    assert yaml.safe_load(Path(new[at + 1]).read_text()) == yaml.safe_load(PLAIN)
    assert DTRConfig.from_any(environment[CONFIG]).budget == "70GB"


ON_CPU = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"


def launched(tmp_path: Path, text: str, arguments: str, **environment: str) -> tuple[list[str], str]:
    """The launcher's options without the yaml, and what the workers are told to run on."""
    (tmp_path / "dtr.yaml").write_text(f"dtr: {{budget: 70GB}}\n{text}")
    given = [*f"--config {tmp_path / 'dtr.yaml'} {arguments}".split(), "train.py", "--cpu"]
    new = without_section(given, environment)
    assert new[-2:] == ["train.py", "--cpu"]
    at = new.index("--config_file")
    assert CONFIG in environment
    return [*new[:at], *new[at + 2 : -2]], environment.get("ACCELERATE_USE_CPU", "")


@pytest.mark.parametrize(
    ("text", "arguments", "options"),
    [
        (ON_CPU, "", ["--multi_gpu"]),
        (ON_CPU.replace("2", "'2'  # as many"), "", ["--multi_gpu"]),
        (ON_CPU.replace("MULTI_CPU", "MULTI_GPU"), "--multi_gpu", ["--multi_gpu"]),
        (ON_CPU.replace("2", "1"), "--num-processes=2", ["--multi_gpu", "--num-processes=2"]),
        (
            "distributed_type: 'NO'\n",
            "--num_processes 2 --cpu --debug",
            ["--multi_gpu", "--num_processes", "2", "--debug"],
        ),
    ],
)
def test_several_processes_on_cpu_are_started_without_mpirun(
    tmp_path: Path, text: str, arguments: str, options: list[str]
) -> None:
    assert launched(tmp_path, text, arguments) == (options, "true")


@pytest.mark.parametrize(
    ("text", "arguments", "environment"),
    [
        (ON_CPU.replace("2", "1"), "", {}),
        (ON_CPU.replace("use_cpu: true", "use_cpu: false"), "", {}),
        (ON_CPU.replace("MULTI_CPU", "FSDP"), "", {}),
        (f"{ON_CPU}mpirun_config:\n  mpirun_hostfile: hosts\n", "", {}),
        (ON_CPU, "--mpirun_hostfile hosts", {}),
        (ON_CPU, "--use_deepspeed", {}),
        (ON_CPU, "", {"OMPI_COMM_WORLD_SIZE": "2"}),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", "", {}),
    ],
)
def test_every_other_launcher_is_accelerates_choice(
    tmp_path: Path, text: str, arguments: str, environment: dict[str, str]
) -> None:
    assert launched(tmp_path, text, arguments, **environment) == (arguments.split(), "")


@pytest.mark.parametrize(
    "arguments",
    [
        "train.py",
        "--cpu train.py --config {}",
        "--config missing.yaml train.py",
        "--config",
        "",
        "-m m --config {}",
    ],
)
def test_other_arguments_stay_as_they_are(config: Path, arguments: str) -> None:
    environment: dict[str, str] = {}
    given = arguments.format(config).split()
    assert without_section(given, environment) == given
    assert not environment


def test_a_yaml_without_a_section_keeps_accelerates_own_error(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text(PLAIN)
    given = ["--config", str(path), "train.py"]
    assert without_section(given, {}) == given


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["/usr/bin/accelerate", "launch", "--config", "x"], 2),
        (["/usr/bin/accelerate-launch", "--config", "x"], 1),
        (["/site-packages/accelerate/commands/launch.py", "--config", "x"], 1),
        (["/site-packages/accelerate/commands/accelerate_cli.py", "launch"], 2),
        (["/usr/bin/accelerate", "config"], None),
        (["train.py", "launch", "--config", "x"], None),
        (["/home/launch.py", "--config", "x"], None),
        (["-c"], None),
        ([], None),
    ],
)
def test_only_accelerates_launcher_is_recognised(argv: list[str], start: int | None) -> None:
    assert _autoload._launch_arguments(argv, ["python", *argv]) == start


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("accelerate.commands.launch", 1),
        ("accelerate.commands.accelerate_cli", 2),
        ("torch.distributed.run", None),
    ],
)
def test_the_launcher_as_a_module_is_recognised(module: str, start: int | None) -> None:
    arguments = ["launch", "--config", "x"]
    assert _autoload._launch_arguments(["-m", *arguments], ["python", "-m", module, *arguments]) == start


def test_import_torch_loads_the_standard_library_alone() -> None:
    """What the hook adds to a process that has nothing to do with it."""
    code = """
import sys
import dtr_integrations
before = set(sys.modules)
from dtr_integrations._autoload import autoload
autoload()
print(sorted(n.partition(".")[0] for n in set(sys.modules) - before))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    new = set(eval(out))
    assert new - {"dtr_integrations"} <= sys.stdlib_module_names


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_broken_environment_never_stops_import_torch(switch: str) -> None:
    environment = {**os.environ, CONFIG: "/not/there.yaml", "DTR_AUTOLOAD": switch}
    code = (
        "import sys; sys.argv[:] = ['accelerate', 'launch', '--config', '\\0']; import torch; print(sys.argv)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "accelerate" in done.stdout
