"""The dry run of one of four made-up ranks: `python fsdp_made_up.py CASE`. Prints one line of JSON."""

from __future__ import annotations

import itertools
import json
import sys

import torch
from fsdp_cases import WIDTH, Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtr_integrations.capture.costs import measured_rates
from dtr_integrations.capture.source import ModuleStep
from dtr_integrations.capture.step import Recorder, dry_step

case = sys.argv[1]
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
shape = (2, 2) if case == "replicated" else (4,)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
options = {}
if case == "bfloat16":
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if case == "kept":
    options["reshard_after_forward"] = False
net = Net()
if case == "partly":
    options["ignored_params"] = set(net.blocks[0].parameters())
for block in net.blocks:
    fully_shard(block, mesh=mesh, **options)
fully_shard(net, mesh=mesh, **options)
if case == "prefetching":
    for one, other in itertools.pairwise(net.blocks):
        one.set_modules_to_forward_prefetch([other])
names = {n: (tuple(p.shape), type(p).__name__) for n, p in net.named_parameters()}
step = ModuleStep(model=net, args=(torch.randn(64, WIDTH),), optimizer=torch.optim.AdamW(net.parameters()))
run = dry_step(step, Recorder(measured_rates("cpu"), strictnesses=False))
assert names == {n: (tuple(p.shape), type(p).__name__) for n, p in net.named_parameters()}
assert all(p.grad is None for p in net.parameters())
state = net.blocks[0]._get_fsdp_state()
assert state._is_root is None  # the real one has not begun
print(
    json.dumps(
        {
            "parameter_bytes": run.static.parameter_bytes,
            "optimizer_bytes": run.static.optimizer_bytes,
            "gradient_bytes": run.static.gradient_bytes,
            "breakdown": run.profile.breakdown,
            "peak_bytes": run.profile.peak_bytes,
            "forward_entries": [r.entry_bytes for r in run.profile.regions if r.kind == "forward"],
            "saved": [r.saved_bytes for r in run.profile.regions if r.kind == "forward"],
            "trained": len(run.trained),
        }
    )
)
