"""Keeps torch's C++ side from writing to stderr about every step that is measured."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["CppWarnings", "quiet_kineto"]


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Without kineto's two lines per session (since torch 2.13: pytorch/kineto#1325).

    Kineto reads its level once, when the first session of the process opens, so later sessions stay quiet
    too. A level that the user has set stands.
    """
    variable = "KINETO_LOG_LEVEL"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = "6"  # above the last of kineto's levels
    try:
        yield
    finally:
        del os.environ[variable]


class CppWarnings:
    """c10's log level, raised between `mute()` and `unmute()` so that warnings are not written.

    c10 warns of each death of a block that is older than the profiler's session ("Memory block of unknown
    size"), and in every training step the old gradients are. Python warnings do not pass here. Where the
    level is not found (c10 built with glog), nothing happens.
    """

    _ERROR = 2

    def __init__(self) -> None:
        self._before: int | None = None

    def mute(self) -> None:
        """Raises the level, unless it is as high already."""
        level = _c10_log_level()
        if level is not None and level.value < self._ERROR:
            self._before = level.value
            level.value = self._ERROR

    def unmute(self) -> None:
        """Puts the level back."""
        level = _c10_log_level()
        if level is not None and self._before is not None:
            level.value = self._before
            self._before = None


def _c10_log_level() -> ctypes.c_int | None:
    for name in ("libc10.so", "libc10.dylib"):
        library = Path(torch.__file__).parent / "lib" / name
        if library.exists():
            try:
                return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
            except (OSError, ValueError):
                return None
    return None
