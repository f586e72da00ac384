"""What the garbage collector looks at while a step is planned."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def own_garbage() -> Iterator[None]:
    """Inside the block the collector looks at objects that were made in it, and those among them that are
    garbage are gone after it. Also a decorator.

    A process that has imported torch and compiled something holds millions of objects; compiling makes the
    collector walk over all of them every few seconds. Nothing changes where somebody has frozen theirs.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
