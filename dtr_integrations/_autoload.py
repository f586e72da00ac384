"""What makes `accelerate launch --config dtr.yaml train.py` work, with a `train.py` that knows nothing of it.

torch calls `autoload` at the end of `import torch` (entry point group `torch.backends`). In Accelerate's own
launcher, whose parser knows neither `--config` nor a section `dtr:`, the section is taken out of the yaml
before the command line is read, and its place goes into the environment; and where several processes on CPU
are asked for, they are started without mpirun. In the workers that inherit it, the first
`Accelerator.prepare` installs a budget. Every other process is left as it is: nothing but the standard
library is loaded here, nothing is ever raised, and `DTR_AUTOLOAD=0` turns it off.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import Any

CONFIG = "DTR_CONFIG_FILE"  # in the environment of launcher and workers: a yaml with the section `dtr:`
SWITCH = "DTR_AUTOLOAD"

# Variables that mpirun sets, and options that ask for another launcher than that of plain processes.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_OTHER_LAUNCHERS = ("tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")

# Options of `accelerate launch` without a value: what follows one may be the script.
_FLAGS = frozenset(
    """-q --quiet --cpu --multi_gpu --tpu --enable_cpu_affinity --dynamo_use_fullgraph --dynamo_use_dynamic
    --dynamo_use_regional_compilation --use_deepspeed --use_fsdp --use_parallelism_config --use_megatron_lm
    --same_network -m --module --no_python --tpu_cluster --no_tpu_cluster --tpu_use_sudo --downcast_bf16
    --fp8_use_autocast_during_eval --debug --use_mps_device --use_xpu -h --help""".split()  # noqa: SIM905
)


def autoload() -> None:
    """Called by torch at the end of its import, in every process. Never raises."""
    with contextlib.suppress(Exception):
        if os.environ.get(SWITCH) == "0":
            return
        if CONFIG in os.environ:
            sys.meta_path.insert(0, _WhenAccelerateIsThere())
            return
        start = _launch_arguments(sys.argv, sys.orig_argv)
        if start is not None:
            sys.argv[start:] = without_section(sys.argv[start:], os.environ)


def without_section(
    arguments: list[str], environment: MutableMapping[str, str], *, section: str = ""
) -> list[str]:
    """The arguments of `accelerate launch` as its own parser takes them.

    If `--config`, `--config=` or `--config_file` names a yaml with a section `dtr:`, the arguments name a
    copy without it, and `environment` the section. Otherwise they are returned as they are, and Accelerate
    says what it says. What follows the script belongs to the script. `section`: taken where the yaml has
    none or none is named.
    """
    options, end = _options_of(arguments)
    given = next((option for option in options if option[0] in ("config", "config_file")), None)
    if given is None and not section:
        return arguments
    launcher, text = arguments[:end], ""
    if given is not None:
        _, path, start, stop = given
        if not os.path.isfile(path):
            return arguments
        with open(path, encoding="utf-8") as file:
            own, text = split_section(file.read())
        if not own and not section:
            return arguments
        copy = _written(own or section, os.path.basename(path), text, environment)
        launcher[start:stop] = ["--config_file", copy]
    else:
        _written(section, "", "", environment)
    values = _scalars(text) | {name: value for name, value, *_ in options}
    return [*_on_cpu(launcher, values, environment), *arguments[end:]]


def _options_of(arguments: list[str]) -> tuple[list[tuple[str, str, int, int]], int]:
    """The launcher's own options as (name, value, from, to), and where the script begins. A name is without
    dashes in front and with underscores inside; a flag's value is `true`."""
    options = []
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        name, equals, value = arguments[at].partition("=")
        stop = at + (1 if equals or name in _FLAGS else 2)
        if not equals:
            value = "true" if name in _FLAGS else "".join(arguments[at + 1 : stop])
        options.append((name.lstrip("-").replace("-", "_"), value, at, stop))
        at = stop
    return options, min(at, len(arguments))


def launcher_option(name: str, arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of an option of the launcher, not of the script, or None; and the arguments without it."""
    for own, value, start, stop in _options_of(arguments)[0]:
        if own == name:
            return value, [*arguments[:start], *arguments[stop:]]
    return None, arguments


def _on_cpu(
    launcher: list[str], values: Mapping[str, str], environment: MutableMapping[str, str]
) -> list[str]:
    """The launcher's options that start as many processes on CPU as yaml and options (`values`) ask for.

    Accelerate leaves several processes on CPU to mpirun and starts a single one without it. Its launcher of
    GPU processes (torchrun) starts them too, and they learn from the environment what they run on.
    """

    def says(name: str) -> bool:
        return values.get(name, "").lower() in ("true", "yes", "on", "1")

    processes = values.get("num_processes", "")
    if not (says("cpu") or says("use_cpu")) or not processes.isdigit() or int(processes) < 2:
        return launcher
    if any(name.startswith("mpirun") for name in values) or any(name in environment for name in _MPI_SIZES):
        return launcher
    kind = values.get("distributed_type", "").upper()
    if kind not in ("MULTI_CPU", "MULTI_GPU", "NO") or any(says(name) for name in _OTHER_LAUNCHERS):
        return launcher
    environment["ACCELERATE_USE_CPU"] = "true"
    return ["--multi_gpu", *(option for option in launcher if option not in ("--cpu", "--multi_gpu"))]


def _written(section: str, name: str, rest: str, environment: MutableMapping[str, str]) -> str:
    """Write the section, which `environment` names then, and the rest of its yaml as a file called `name`,
    unless that is empty. Returns the latter's path. Both go when the launcher ends."""
    directory = tempfile.mkdtemp(prefix="dtr-launch-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    ours = "dtr.yaml" if name != "dtr.yaml" else "section.yaml"
    for own, text in ((ours, section), (name, rest)):
        if own:
            with open(os.path.join(directory, own), "w", encoding="utf-8") as file:
                file.write(text)
    environment[CONFIG] = os.path.join(directory, ours)
    return os.path.join(directory, name)


def _scalars(text: str) -> dict[str, str]:
    """The top-level entries of a yaml whose value is one word, as text; a nested one has an empty value."""
    found = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and line[:1] not in (" ", "\t", "#", "-"):
            words = value.partition(" #")[0].strip()
            found[name.strip().strip("'\"")] = words.strip("'\"")
    return found


def split_section(text: str) -> tuple[str, str]:
    """(the top-level section `dtr:`, the rest) of a yaml, as text; an empty section where there is none.

    A top-level section ends at the next line that begins in the first column and is no comment.
    """
    section: list[str] = []
    rest: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line[:1] not in (" ", "\t", "#", "\n", "\r", ""):
            inside = line.partition(":")[0].rstrip() in ("dtr", '"dtr"', "'dtr'") and ":" in line
        (section if inside else rest).append(line)
    return "".join(section), "".join(rest)


def _launch_arguments(argv: list[str], original: list[str]) -> int | None:
    """Where the arguments of `accelerate launch` begin in this process's command line; None in any other."""
    if not argv:
        return None
    program = os.path.basename(argv[0]).removesuffix(".exe").removesuffix("-script.py")
    module = ""
    if argv[0] == "-m" and "-m" in original:  # `python -m` imports the packages above the module first
        module = original[original.index("-m") + 1]
    elif program.endswith(".py"):
        module = ".".join([*argv[0].replace(os.sep, "/").split("/")[-3:-1], program.removesuffix(".py")])
    if program == "accelerate-launch" or module == "accelerate.commands.launch":
        return 1
    if program == "accelerate" or module == "accelerate.commands.accelerate_cli":
        return 2 if argv[1:2] == ["launch"] else None
    return None


class _WhenAccelerateIsThere:
    """Not a finder: it finds nothing, and is asked at every import until Accelerate has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """None: imports go on as without it."""
        with contextlib.suppress(Exception):
            accelerate = sys.modules.get("accelerate")
            accelerator = getattr(accelerate, "Accelerator", None)
            if accelerator is not None and self in sys.meta_path:
                sys.meta_path.remove(self)
                _install_at_prepare(accelerator)
        return None


def _install_at_prepare(accelerator: Any) -> None:
    prepare = accelerator.prepare

    def prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator.prepare = prepare
        from .accelerate import watch_prepare  # torch and Accelerate are there by now

        watch_prepare()
        return self.prepare(*args, **kwargs)

    accelerator.prepare = prepared
