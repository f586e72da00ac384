"""One rank of a training with DDP: `python ddp_cases.py DOOR RANK WORLD_SIZE PORT BUDGET VIEWS DIRECTORY`.

DOOR is "plain", "wrapped", "accelerate", "fabric" or "lightning", VIEWS 0 or 1 (`gradient_as_bucket_view`).
Prints one line of JSON.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import nn
from two_ranks import begin, say

from dtr_integrations.measure import trace_step

STEPS = 4


WIDTH = int(os.environ.get("WIDTH", "64"))  # 256: beyond DDP's first bucket of 1 MiB


class Net(nn.Module):
    """Six blocks of `WIDTH`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(512, WIDTH, generator=generator) for _ in range(STEPS)]


def plain(rank: int, budget: str, views: bool, directory: str, *, wrapped: bool = False) -> tuple[Any, Any]:
    import dtr_integrations

    torch.distributed.init_process_group("gloo")
    net = Net()
    parallel = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session = dtr_integrations.auto_checkpoint(
        parallel if wrapped else net,
        optimizer=optimizer,
        budget=budget,
        progress=False,
        log_every_n_steps=1,
        run_dir=directory,
    )

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        first, second = x.chunk(2)
        with parallel.no_sync():
            parallel(first).square().mean().backward()
        parallel(second).square().mean().backward()
        optimizer.step()

    for x in batches(rank):
        session.step(lambda x=x: step(x))
    return session, parallel


def with_accelerate(rank: int, budget: str, views: bool, directory: str) -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from dtr_integrations.accelerate import install

    engine = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=views)]
    )
    installed = install(engine, budget=budget, progress=False, log_every_n_steps=1, run_dir=directory)
    model = Net()
    model, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x in batches(rank):
        optimizer.zero_grad()
        engine.backward(model(x).square().mean())
        optimizer.step()
    return installed, model


def with_lightning(rank: int, budget: str, views: bool, directory: str) -> tuple[Any, Any]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from dtr_integrations import AutoCheckpoint

    parallel: list[Any] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def on_train_end(self) -> None:
            parallel.append(self.trainer.strategy.model)

    module = Module()
    callback = AutoCheckpoint(budget, progress=False, log_every_n_steps=1, run_dir=directory)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(gradient_as_bucket_view=views, process_group_backend="gloo"),
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches(rank), batch_size=None))
    return callback, parallel[0]


def with_fabric(rank: int, budget: str, views: bool, directory: str) -> tuple[Any, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from dtr_integrations.fabric import AutoCheckpoint

    callback = AutoCheckpoint(budget, progress=False, log_every_n_steps=1, run_dir=directory)
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=views)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, callbacks=callback)
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x in batches(rank):
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()
    return callback, model._forward_module


DOORS = {
    "plain": plain,
    "wrapped": functools.partial(plain, wrapped=True),
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "lightning": with_lightning,
}


def allocated_for_buckets(views: bool) -> int:
    """What torch's allocator says that a `DistributedDataParallel` keeps, beside its module."""
    net = Net()
    with trace_step(device="cpu") as trace:
        parallel = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=views)
    assert parallel.module is net
    return trace.peak.end_bytes


def main() -> None:
    door, rank, world_size, port, budget, views, directory = sys.argv[1:]
    begin(rank, world_size, port)
    held, model = DOORS[door](int(rank), budget, views == "1", directory)
    torchs_own = model._get_ddp_logging_data()
    say(
        held,
        gradients=[p.grad.flatten().tolist() for p in model.parameters()],
        bucket_bytes=sum(map(int, torchs_own["rebuilt_bucket_sizes"].split(","))),
        allocated_for_buckets=allocated_for_buckets(views == "1"),
        parameter_bytes=sum(p.nbytes for p in model.parameters()),
    )


if __name__ == "__main__":
    main()
