"""Time of one op in milliseconds: a roofline over rates that were measured once on this device.

`max(flops / rate(kind, dtype), bytes / bandwidth)` (design §5). Flops come from torch's own formulas
(`torch.utils.flop_counter`); an op without a formula that is a library kernel is charged by its bytes at a
quarter of the bandwidth, so that nothing unknown looks free. Rates are measured on small inputs in well under
a second, once per process and device; on a device that is not there, published peaks of a current accelerator
stand in.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_ATTENTION_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Floating point operations and bytes per millisecond of one device."""

    matmul: dict[str, float]  # by dtype
    convolution: float
    attention: float
    bandwidth: float  # bytes read or written per ms, for large contiguous pointwise ops


def _best_ms(run: Callable[[], Any], device: torch.device, tries: int = 5) -> float:
    best = math.inf
    for _ in range(tries):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) * 1e3)
    return max(best, 1e-4)


@lru_cache(maxsize=8)
def measured_rates(device_type: str) -> Rates:
    """Rates of the device: measured once and kept in the user's cache folder.

    Kept, so that the same step gets the same plan in the next process: another plan would miss the compile
    cache. Delete the file to measure again. Random state is not touched (inputs are zeros).
    """
    name = torch.cuda.get_device_name() if device_type == "cuda" else f"{torch.get_num_threads()}-threads"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtr_integrations"
    path = folder / f"rates-{device_type}-{name.replace(' ', '_')}-torch-{torch.__version__}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Rates(**json.loads(path.read_text()))
    rates = _measure_rates(device_type)
    with contextlib.suppress(OSError):  # a folder that cannot be written to: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(asdict(rates)))
        fresh.replace(path)
    return rates


def _measure_rates(device_type: str) -> Rates:
    device = torch.device(device_type)
    with torch.no_grad():
        matmul = {}
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.zeros(512, 512, dtype=dtype, device=device)
            matmul[str(dtype)] = 2 * 512**3 / _best_ms(partial(torch.mm, a, a), device)
        image = torch.zeros(4, 32, 64, 64, device=device)
        kernel = torch.zeros(32, 32, 3, 3, device=device)
        conv_flops = 2 * 4 * 64 * 64 * 32 * 32 * 9
        convolution = conv_flops / _best_ms(
            lambda: torch.nn.functional.conv2d(image, kernel, padding=1), device
        )
        q = torch.zeros(4, 4, 256, 64, device=device)
        attention_flops = 4 * 4 * 4 * 256 * 256 * 64
        attention = attention_flops / _best_ms(
            lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), device
        )
        x = torch.zeros(4 << 20, device=device)
        y = torch.zeros_like(x)
        bandwidth = 3 * x.nbytes / _best_ms(lambda: torch.add(x, y, out=y), device)
    return Rates(matmul=matmul, convolution=convolution, attention=attention, bandwidth=bandwidth)


def _bytes(value: Any) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    )


def _attention_flops(args: tuple[Any, ...], backward: bool) -> float:
    """Both products of attention; torch's registry has no formula for the CPU kernels."""
    query, key, value = args[1:4] if backward else args[:3]
    batch_heads = math.prod(query.shape[:-2])
    pair = batch_heads * query.shape[-2] * key.shape[-2]
    forward = 2.0 * pair * (query.shape[-1] + value.shape[-1])
    return forward * 2.5 if backward else forward


def _flops(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[float, str] | None:
    name = str(target)
    if _ATTENTION_FOR_CPU in name:
        return _attention_flops(args, "backward" in name), "attention"
    packet = getattr(target, "overloadpacket", None)
    if packet not in flop_registry:
        return None
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "attention" in name:
        return flops, "attention"
    return flops, "convolution" if "convolution" in name else "matmul"


def op_cost_ms(node: Node, rates: Rates, *, extern: bool) -> float:
    """Modelled time of one node of a joint graph; 0 for views and numbers (the caller knows which)."""
    out = node.meta.get("val")
    args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), (node.args, dict(node.kwargs)))
    traffic = _bytes(out) + _bytes((args, kwargs))
    memory_ms = traffic / rates.bandwidth
    try:
        counted = _flops(node.target, args, kwargs, out)
    except Exception:  # a formula may not know an overload's arguments: the op is then charged by its bytes
        counted = None
    if counted is None:
        return memory_ms * (4 if extern else 1)
    flops, kind = counted
    if kind == "matmul":
        dtype = str(out.dtype) if isinstance(out, torch.Tensor) else "torch.float32"
        rate = rates.matmul.get(dtype, rates.matmul["torch.float32"])
    else:
        rate = rates.attention if kind == "attention" else rates.convolution
    return max(flops / rate, memory_ms)
