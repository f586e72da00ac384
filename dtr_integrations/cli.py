"""The command `dtr`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from ._autoload import CONFIG, SWITCH, launcher_option, without_section
from .errors import ConfigError, DTRError

_USAGE = """\
usage: dtr launch [--budget SIZE] [--config FILE] [OPTIONS] SCRIPT [ARGUMENTS]

Starts SCRIPT, unchanged, as `accelerate launch` does, and keeps what it trains under a memory budget.

  --budget SIZE   total memory of one rank's device: 70GB, 65.2GiB, 90%, auto; in place of the file's
  --config FILE   a yaml of Accelerate; its section `dtr:`, if it has one, holds the budget and other settings
  OPTIONS         those of `accelerate launch`, which `accelerate launch --help` lists
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["launch"] or given[1:] in ([], ["-h"], ["--help"]):
        asked = given in (["-h"], ["--help"]) or given[:1] == ["launch"]
        (sys.stdout if asked else sys.stderr).write(_USAGE)
        return 0 if asked else 2
    try:
        _launch(given[1:])
    except DTRError as error:
        sys.stderr.write(f"dtr launch: error: {error}\n")
        return 2
    return 0


def _launch(arguments: list[str]) -> None:
    """Raises `ConfigError` before anything is started."""
    if os.environ.get(SWITCH) == "0":
        raise ConfigError(f"{SWITCH}=0 is set, so the workers would train without a budget; unset it")
    budget, arguments = launcher_option("budget", arguments)
    config, _ = launcher_option("config", arguments)
    config = config or launcher_option("config_file", arguments)[0]
    if config is not None and not os.path.isfile(config):
        raise ConfigError(f"there is no file {config!r}")
    os.environ.pop(CONFIG, None)  # of a launcher around this one
    section = "" if budget is None else f"dtr: {{budget: {json.dumps(budget)}}}\n"
    arguments = without_section(arguments, os.environ, section=section)
    if CONFIG not in os.environ:
        where = f"{config!r} has no section `dtr:`" if config else "no --config is given"
        raise ConfigError(
            f"there is no budget: {where}. Give --budget 70GB, or a yaml with\ndtr:\n  budget: 70GB"
        )
    _check(budget)
    _accelerate(arguments)


def _check(budget: str | None) -> None:
    """What the workers will read is right; a budget of the command line is in it."""
    from .config import DTRConfig

    path = os.environ[CONFIG]
    settings = DTRConfig.from_any(path, **({} if budget is None else {"budget": budget}))
    if budget is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"dtr": settings.to_dict()}, file)  # which is yaml too


def _accelerate(arguments: list[str]) -> None:
    try:
        from accelerate.commands.launch import launch_command, launch_command_parser
    except ModuleNotFoundError as error:
        from .errors import MissingExtra

        raise MissingExtra(what="dtr launch", package="accelerate", extra="accelerate") from error
    launch_command(launch_command_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
