"""What one rank of a run does, by name: `python rank_cases.py CASE RANK WORLD_SIZE PORT`.

It trains a tiny model with DDP on gloo, and prints one line of JSON: what it came to.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtr_integrations
from dtr_integrations.errors import DTRError, PlanWarning


class Net(nn.Module):
    """Two layers of 32, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


class WithOtherParameters(Net):
    """Leaves the second layer out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x)).square().mean()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_slow() -> None:
    time.sleep(4)


BEFALLS = {"die": die, "stall": stall, "slow": be_slow}


def befall(session: Any, case: str) -> None:
    """Let it happen to this rank when it begins to plan, or when its first graph is compiled."""
    what, _, when = case.partition(" ")
    if what not in BEFALLS:
        return
    if when == "planning":
        session._progress = lambda message: BEFALLS[what]()
        return
    decide = session._decisions

    def befallen(*arguments: Any) -> Any:
        BEFALLS[what]()
        return decide(*arguments)

    befallen.adopt = decide.adopt  # type: ignore[attr-defined]
    session._decisions = befallen


def run(case: str, rank: int, world_size: int) -> dict[str, Any]:
    """`case` befalls the last rank; "shapes" gives each its own batch."""
    odd = rank == world_size - 1
    torch.manual_seed(0)
    model = WithOtherParameters() if odd and case == "another step" else Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = "1KB" if odd and case == "infeasible" else "1GB"
    session = dtr_integrations.auto_checkpoint(model, optimizer=optimizer, budget=budget, progress=False)
    if odd:
        befall(session, case)
    parallel = nn.parallel.DistributedDataParallel(model)
    batch = 16 * (rank + 1) if case == "shapes" else 16
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = parallel(torch.randn(batch, 32))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    session.close()
    gradients = [p.grad.norm().item() for p in model.parameters()]
    digest = session.plan.digest
    graphs = [schedule.fingerprint for schedule in session.plan.schedule]
    return {"losses": losses, "gradients": gradients, "digest": digest, "graphs": graphs}


def main() -> None:
    case, rank, world_size, port = sys.argv[1], *map(int, sys.argv[2:])
    warnings.simplefilter("error", PlanWarning)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    begun = time.monotonic()
    try:
        result = run(case, rank, world_size)
    except DTRError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    result["seconds"] = time.monotonic() - begun
    print(json.dumps(result), flush=True)
    if "error" in result:
        os._exit(1)  # its process group is left as it is
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
