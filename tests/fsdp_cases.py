"""One rank of a training with FSDP2: `python fsdp_cases.py DOOR RANK WORLD_SIZE PORT BUDGET DIRECTORY`.

DOOR is "plain", "accelerate", "fabric" or "lightning". Prints one line of JSON.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import begin, say

from dtr_integrations.measure import trace_step

STEPS = 5
WIDTH = 64
MICRO_BATCHES = int(os.environ.get("MICRO_BATCHES", "1"))  # with Accelerate


class Block(nn.Module):
    """A residual MLP; its seven parameters are gathered together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH + 1))  # an odd number over two ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x)))) * self.scale[:-1]


class Net(nn.Module):
    """Four blocks, of which the last is frozen, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def sharded(net: Net, mesh: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)  # type: ignore[return-value]


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(512, WIDTH, generator=generator) for _ in range(STEPS)]


def plain(rank: int, budget: str, directory: str) -> tuple[Any, Any]:
    import dtr_integrations

    torch.distributed.init_process_group("gloo")
    net = sharded(Net(), init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session = dtr_integrations.auto_checkpoint(
        net, optimizer=optimizer, budget=budget, progress=False, log_every_n_steps=1, run_dir=directory
    )

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    for x in batches(rank):
        session.step(lambda x=x: step(x))
    return session, net


def with_accelerate(rank: int, budget: str, directory: str) -> tuple[Any, Any]:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from dtr_integrations.accelerate import install

    PartialState(cpu=True)  # Accelerate has FSDP2 for accelerators only, and does not mind what they are
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    engine = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES)
    installed = install(engine, budget=budget, progress=False, log_every_n_steps=1, run_dir=directory)
    net = Net()
    net, optimizer = engine.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for x in batches(rank):
        for part in x.chunk(MICRO_BATCHES):
            with engine.accumulate(net):
                engine.backward(net(part).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return installed, net


def with_lightning(rank: int, budget: str, directory: str) -> tuple[Any, Any]:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    from dtr_integrations import AutoCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            sharded(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    callback = AutoCheckpoint(budget, progress=False, log_every_n_steps=1, run_dir=directory)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo"),
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches(rank), batch_size=None))
    return callback, module.net


def with_fabric(rank: int, budget: str, directory: str) -> tuple[Any, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from dtr_integrations.fabric import AutoCheckpoint

    callback = AutoCheckpoint(budget, progress=False, log_every_n_steps=1, run_dir=directory)
    strategy = ModelParallelStrategy(
        lambda net, mesh: sharded(net, mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, callbacks=callback)
    fabric.launch()
    net = fabric.setup(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    for x in batches(rank):
        optimizer.zero_grad()
        fabric.backward(net(x).square().mean())
        optimizer.step()
    return callback, net


DOORS = {
    "plain": plain,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "lightning": with_lightning,
}


def allocated_for_gathers(net: nn.Module) -> list[int]:
    """What torch's allocator says that the whole parameters of a block take, and those of the rest."""
    sizes = []
    for module in (net.blocks[0], net):
        module.reshard()
        with trace_step(device="cpu") as trace:
            module.unshard()
        module.reshard()
        sizes.append(trace.peak.end_bytes)
    return sizes


def main() -> None:
    door, rank, world_size, port, budget, directory = sys.argv[1:]
    begin(rank, world_size, port)
    held, net = DOORS[door](int(rank), budget, directory)
    shards = {name: p.to_local() for name, p in net.named_parameters()}
    say(
        held,
        allocated_for_gathers=allocated_for_gathers(net),
        weights={name: shard.flatten().tolist() for name, shard in shards.items()},
        storage_bytes=sum(shard.untyped_storage().nbytes() for shard in shards.values()),
    )


if __name__ == "__main__":
    main()
