"""Random small modules: a seed gives the source of an `nn.Module`, a batch for it and a loss.

The module is written as source text, line by line, as a person would write it, so that a seed that fails can
be read (`build(seed).source`) and cut down by hand. Real layers in a random DAG: shared and tied modules,
frozen parameters, views, in-place ops on fresh values, random ops, buffers updated in the forward, graph
breaks, dead branches, several outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Scale(torch.autograd.Function):
    """Multiplies; its backward reads the input that it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum_to_size(factor.shape)


class Straight(torch.autograd.Function):
    """Signs in the forward, the identity in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-1, 1)


@dataclass(kw_only=True)
class Value:
    """A local variable of the generated forward."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "flat" (rows, width), "seq" (batch, length, width), "signal" and "image": channels second
    fresh: bool = False  # nobody has read it and no backward needs it: may be changed in place
    used: bool = False


@dataclass(kw_only=True)
class Sample:
    """What a seed gives. `batch` are keyword arguments of the module; `loss` takes its output."""

    seed: int
    source: str
    model: nn.Module
    batch: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor]
    optimizer: torch.optim.Optimizer
    autocast: bool
    low_precision: bool  # values pass through bfloat16
    budget_draw: float


@dataclass
class Writer:
    """Writes the module's source; `rng` decides everything."""

    rng: random.Random
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    made: dict[str, list[str]] = field(default_factory=dict)  # constructor -> names of modules
    count: int = 0
    low_precision: bool = False

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def module(self, constructor: str, *, tie: bool = False, share: bool = True) -> str:
        """A module in `__init__`; now and then one that is there already, or with its weight tied to one."""
        known = self.made.setdefault(constructor, [])
        if known and share and self.rng.random() < 0.3:
            return self.rng.choice(known)
        name = self.name("self.m")
        self.init.append(f"{name} = {constructor}")
        if known and tie and self.rng.random() < 0.5:
            self.init.append(f"{name}.weight = {known[0]}.weight")
        elif self.rng.random() < 0.08:
            self.init.append(f"{name}.requires_grad_(False)")
        known.append(name)
        return name

    def parameter(self, *shape: int) -> str:
        name = self.name("self.p")
        self.init.append(f"{name} = nn.Parameter(torch.randn{shape} * 0.3)")
        return name

    def buffer(self, expression: str) -> str:
        name = self.name("b")
        self.init.append(f"self.register_buffer({name!r}, {expression})")
        return f"self.{name}"

    def line(self, text: str) -> None:
        self.body.append(text)

    def new(
        self,
        expression: str,
        like: Value,
        shape: tuple[int, ...] | None = None,
        *,
        kind: str = "",
        fresh: bool = False,
    ) -> Value:
        value = Value(name=self.name("v"), shape=shape or like.shape, kind=kind or like.kind, fresh=fresh)
        self.line(f"{value.name} = {expression}")
        self.values.append(value)
        return value

    def other(self, x: Value) -> Value | None:
        """Another value of the same shape."""
        same = [v for v in self.values if v is not x and v.shape == x.shape and v.kind == x.kind]
        return self.rng.choice(same) if same else None


Op = Callable[[Writer, Value], Value | None]
_OPS: dict[str, list[tuple[float, Op]]] = {"flat": [], "seq": [], "signal": [], "image": []}


def op(*kinds: str, weight: float = 1.0) -> Callable[[Op], Op]:
    def enter(function: Op) -> Op:
        for kind in kinds:
            _OPS[kind].append((weight, function))
        return function

    return enter


_ROWS = ("flat", "seq")
_PLANES = ("signal", "image")
_ALL = (*_ROWS, *_PLANES)


# -- layers ------------------------------------------------------------


@op(*_ROWS, weight=5)
def linear(w: Writer, x: Value) -> Value:
    width = w.rng.choice((x.shape[-1], x.shape[-1], 16, 32, 48))
    layer = w.module(f"nn.Linear({x.shape[-1]}, {width}, bias={w.rng.random() < 0.7})", tie=True)
    return w.new(f"{layer}({x.name})", x, (*x.shape[:-1], width), fresh=True)


@op(*_ROWS, weight=2)
def row_norm(w: Writer, x: Value) -> Value:
    norm = w.rng.choice(("LayerNorm", "RMSNorm"))
    return w.new(f"{w.module(f'nn.{norm}({x.shape[-1]})')}({x.name})", x, fresh=True)


@op("flat", *_PLANES, weight=2)
def batch_norm(w: Writer, x: Value) -> Value:
    dim = 2 if x.kind == "image" else 1
    return w.new(f"{w.module(f'nn.BatchNorm{dim}d({x.shape[1]})')}({x.name})", x, fresh=True)


@op(*_PLANES)
def group_norm(w: Writer, x: Value) -> Value:
    return w.new(f"{w.module(f'nn.GroupNorm(4, {x.shape[1]})')}({x.name})", x, fresh=True)


@op(*_PLANES, weight=4)
def conv(w: Writer, x: Value) -> Value | None:
    dim, channels = len(x.shape) - 2, x.shape[1]
    how = w.rng.choice(("plain", "plain", "wide", "depthwise", "strided", "dilated", "pointwise"))
    out = w.rng.choice((8, 16)) if how in ("wide", "pointwise") else channels
    if how == "strided" and min(x.shape[2:]) < 8:
        return None
    extra = {
        "depthwise": f"3, padding=1, groups={channels}",
        "strided": "3, padding=1, stride=2",
        "dilated": "3, padding=2, dilation=2",
        "pointwise": "1",
    }.get(how, f"3, padding=1, bias={w.rng.random() < 0.5}")
    layer = w.module(f"nn.Conv{dim}d({channels}, {out}, {extra})")
    sides = tuple(s // 2 for s in x.shape[2:]) if how == "strided" else x.shape[2:]
    return w.new(f"{layer}({x.name})", x, (x.shape[0], out, *sides), fresh=True)


@op("image", weight=0.5)
def conv_transpose(w: Writer, x: Value) -> Value | None:
    if x.shape[2] > 8:
        return None
    layer = w.module(f"nn.ConvTranspose2d({x.shape[1]}, 8, 2, stride=2)")
    return w.new(f"{layer}({x.name})", x, (x.shape[0], 8, *(2 * s for s in x.shape[2:])), fresh=True)


@op(*_PLANES, weight=1.5)
def pool(w: Writer, x: Value) -> Value | None:
    if min(x.shape[2:]) < 8:
        return None
    dim = len(x.shape) - 2
    sides = tuple(s // 2 for s in x.shape[2:])
    layer = w.rng.choice(
        (f"nn.MaxPool{dim}d(2)", f"nn.AvgPool{dim}d(2)", f"nn.AdaptiveAvgPool{dim}d({sides[0]})")
    )
    return w.new(f"{w.module(layer)}({x.name})", x, (*x.shape[:2], *sides))


@op(*_PLANES, weight=0.7)
def upsample(w: Writer, x: Value) -> Value | None:
    if max(x.shape[2:]) > 16:
        return None
    mode = "nearest" if x.kind == "signal" else w.rng.choice(("nearest", "bilinear"))
    text = f"F.interpolate({x.name}, scale_factor=2, mode={mode!r})"
    return w.new(text, x, (*x.shape[:2], *(2 * s for s in x.shape[2:])))


@op("image", weight=0.5)
def pixel_shuffle(w: Writer, x: Value) -> Value | None:
    if x.shape[1] < 16:
        return None
    shape = (x.shape[0], x.shape[1] // 4, *(2 * s for s in x.shape[2:]))
    return w.new(f"F.pixel_shuffle({x.name}, 2)", x, shape) if shape[1] >= 4 else None


@op(*_ALL, weight=3)
def activation(w: Writer, x: Value) -> Value:
    how = w.rng.choice(
        ("F.gelu({})", "F.silu({})", "F.relu({})", "torch.tanh({})", "torch.sigmoid({})", "F.softplus({})",
         "F.leaky_relu({}, 0.1)", "F.elu({})", "F.hardswish({})", "F.gelu({}, approximate='tanh')")
    )  # fmt: skip
    return w.new(how.format(x.name), x)


@op(*_ALL, weight=1.5)
def relu_in_place(w: Writer, x: Value) -> Value | None:
    if not x.fresh:
        return None
    how = w.rng.choice(("nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)", "nn.LeakyReLU(0.1, inplace=True)"))
    return w.new(f"{w.module(how)}({x.name})", x)


@op(*_ALL, weight=2.5)
def dropout(w: Writer, x: Value) -> Value:
    p = w.rng.choice((0.1, 0.3, 0.5))
    if x.kind == "image" and w.rng.random() < 0.4:
        return w.new(f"{w.module(f'nn.Dropout2d({p})')}({x.name})", x)
    how = w.rng.choice(("nn.Dropout", "nn.Dropout", "nn.AlphaDropout"))
    return w.new(f"{w.module(f'{how}({p})')}({x.name})", x)


@op("seq", weight=1.5)
def multihead(w: Writer, x: Value) -> Value | None:
    width = x.shape[-1]
    layer = w.module(
        f"nn.MultiheadAttention({width}, 4, dropout={w.rng.choice((0.0, 0.0, 0.1))}, batch_first=True)"
    )
    weights = w.rng.random() < 0.3
    return w.new(f"{layer}({x.name}, {x.name}, {x.name}, need_weights={weights})[0]", x)


@op("seq", weight=1.5)
def attention(w: Writer, x: Value) -> Value:
    batch, length, width = x.shape
    qkv = w.module(f"nn.Linear({width}, {3 * width})")
    name = w.name("qkv")
    w.line(f"{name} = {qkv}({x.name}).view({batch}, {length}, 3, 2, {width // 2}).permute(2, 0, 3, 1, 4)")
    causal = w.rng.random() < 0.5
    out = f"F.scaled_dot_product_attention({name}[0], {name}[1], {name}[2], is_causal={causal})"
    return w.new(f"{out}.transpose(1, 2).reshape({batch}, {length}, {width})", x)


@op("seq", weight=1)
def scores(w: Writer, x: Value) -> Value:
    text = f"torch.bmm(torch.softmax({x.name} @ {x.name}.transpose(1, 2) / {x.shape[-1]}, -1), {x.name})"
    return w.new(text, x, fresh=True)


@op("seq", weight=0.15)
def recurrent(w: Writer, x: Value) -> Value:
    layer = w.module(f"nn.{w.rng.choice(('GRU', 'LSTM'))}({x.shape[-1]}, 16, batch_first=True)")
    return w.new(f"{layer}({x.name})[0]", x, (*x.shape[:-1], 16))


# -- functions ------------------------------------------------------------


@op(*_ALL, weight=4)
def combine(w: Writer, x: Value) -> Value | None:
    y = w.other(x)
    if y is None:
        return None
    y.used, y.fresh = True, False
    how = w.rng.choice(
        (
            "{} + {}",
            "{} + {}",
            "{} * torch.sigmoid({})",
            "{} - 0.5 * {}",
            "torch.maximum({}, {})",
            "torch.where({0} > 0, {0}, {1})",
            "torch.lerp({0}, {1}.to({0}.dtype), 0.3)",
            "torch.addcmul({0}, {0}, {1})",
        )
    )
    return w.new(how.format(x.name, y.name), x, fresh=how in ("{} + {}", "{} - 0.5 * {}"))


@op(*_ROWS, weight=1)
def cat(w: Writer, x: Value) -> Value | None:
    y = w.other(x)
    if y is None or x.shape[-1] > 48:
        return None
    y.used, y.fresh = True, False
    return w.new(f"torch.cat([{x.name}, {y.name}], -1)", x, (*x.shape[:-1], 2 * x.shape[-1]))


@op(*_ROWS)
def gated(w: Writer, x: Value) -> Value | None:
    if x.shape[-1] % 2 or x.shape[-1] < 16:
        return None
    a, b = w.name("a"), w.name("b")
    w.line(f"{a}, {b} = {x.name}.chunk(2, -1)")
    return w.new(
        f"{a} * {w.rng.choice(('torch.sigmoid', 'F.gelu'))}({b})", x, (*x.shape[:-1], x.shape[-1] // 2)
    )


@op(*_ROWS)
def split(w: Writer, x: Value) -> Value:
    at = w.rng.randrange(1, x.shape[-1])
    a, b = w.name("a"), w.name("b")
    w.line(f"{a}, {b} = {x.name}.split([{at}, {x.shape[-1] - at}], -1)")
    return w.new(f"torch.cat([{b}.tanh(), {a}], -1)", x)


@op(*_ROWS)
def sliced(w: Writer, x: Value) -> Value | None:
    if x.shape[-1] < 16:
        return None
    how = w.rng.choice(("..., ::2", "..., 1::2", f"..., :{x.shape[-1] // 2}"))
    return w.new(f"{x.name}[{how}]", x, (*x.shape[:-1], x.shape[-1] // 2))


@op(*_ALL)
def expanded(w: Writer, x: Value) -> Value:
    how = w.rng.choice(("mean", "amax", "logsumexp"))
    return w.new(f"{x.name} - {x.name}.{how}(-1, keepdim=True).expand({', '.join(map(str, x.shape))})", x)


@op(*_ALL)
def reduced(w: Writer, x: Value) -> Value:
    how = w.rng.choice(
        (
            "{0} / (1 + {0}.norm(dim=1, keepdim=True))",
            "{0} * {0}.std(0, keepdim=True)",
            "{0} + {0}.var(dim=-1, keepdim=True)",
            "{0} - {0}.sum(1, keepdim=True) * 0.01",
        )
    )
    return w.new(how.format(x.name), x)


@op(*_ROWS, weight=0.7)
def softmax(w: Writer, x: Value) -> Value:
    how = w.rng.choice(("torch.softmax({}, -1)", "torch.log_softmax({}, -1)", "F.normalize({}, dim=-1)"))
    return w.new(how.format(x.name), x)


@op(*_ROWS, weight=0.7)
def gathered(w: Writer, x: Value) -> Value:
    index = w.name("i")
    w.line(f"{index} = {x.name}.detach().argmax(-1, keepdim=True)")
    return w.new(f"{x.name} + {x.name}.gather(-1, {index})", x)


@op(*_ALL, weight=0.7)
def cumulative(w: Writer, x: Value) -> Value:
    return w.new(f"{x.name}.cumsum({w.rng.choice((1, -1))}) * 0.1", x)


@op(*_ROWS, weight=0.7)
def ordered(w: Writer, x: Value) -> Value:
    if w.rng.random() < 0.5:
        return w.new(f"{x.name}.sort(-1).values", x)
    return w.new(f"{x.name}.topk(8, -1).values", x, (*x.shape[:-1], 8))


@op(*_ROWS, weight=0.5)
def routed(w: Writer, x: Value) -> Value:
    """A top-2 mixture: the choice decides which weights are read."""
    gate, bank, index = w.module(f"nn.Linear({x.shape[-1]}, 4)"), w.parameter(4, x.shape[-1]), w.name("i")
    score = w.name("s")
    w.line(f"{score}, {index} = torch.softmax({gate}({x.name}), -1).topk(2, -1)")
    return w.new(f"{x.name} * ({bank}[{index}] * {score}.unsqueeze(-1)).sum(-2)", x)


@op(*_ROWS, weight=0.7)
def selected(w: Writer, x: Value) -> Value:
    order = w.buffer(f"torch.randperm({x.shape[-1]})")
    how = w.rng.choice(("{}.index_select(-1, {})", "{}[..., {}]"))
    return w.new(how.format(x.name, order), x)


@op(*_ROWS, weight=1)
def einsum(w: Writer, x: Value) -> Value:
    matrix = w.parameter(x.shape[-1], x.shape[-1])
    return w.new(f"torch.einsum('...d,de->...e', {x.name}, {matrix})", x, fresh=True)


@op(*_ALL, weight=0.8)
def masked(w: Writer, x: Value) -> Value:
    how = w.rng.choice(
        (
            "{0}.masked_fill({0} > 1, 0.5)",
            "{0}.clamp(-1, 1)",
            "{0} * ({0}.abs() < 2)",
            "torch.where({0}.isnan(), 0.0, {0})",
        )
    )
    return w.new(how.format(x.name), x)


@op(*_ALL, weight=0.5)
def rolled(w: Writer, x: Value) -> Value:
    how = w.rng.choice(("torch.roll({}, 3, 1)", "{}.flip(-1)", "torch.roll({}, (1, 2), (0, 1))"))
    return w.new(how.format(x.name), x)


@op(*_ALL, weight=0.6)
def random_noise(w: Writer, x: Value) -> Value:
    how = w.rng.choice(
        (
            "{0} + 0.1 * torch.randn_like({0})",
            "{0} * torch.rand_like({0})",
            "torch.where(torch.rand_like({0}) < 0.2, {0} * 2, {0})",
            "{0} * torch.bernoulli(torch.full_like({0}, 0.7))",
            "F.dropout({0}, 0.2)",
        )
    )
    return w.new(how.format(x.name), x)


# -- in-place ------------------------------------------------------------


@op(*_ALL, weight=2)
def in_place(w: Writer, x: Value) -> Value | None:
    if not x.fresh:
        return None
    how = w.rng.choice(
        (
            ".add_(0.5)",
            ".mul_(0.7)",
            ".clamp_(-2, 2)",
            "[:, 1:3].mul_(0.5)",
            ".add_(torch.ones(1))",
            "[0].zero_()",
        )
    )
    w.line(f"{x.name}{how}")
    return w.new(f"torch.tanh({x.name})" if "clamp" in how else f"{x.name} * 1.5", x)


@op(*_ROWS)
def index_put(w: Writer, x: Value) -> Value:
    y, index = w.name("c"), w.buffer("torch.tensor([0, 3, 5])")
    w.line(f"{y} = {x.name}.clone()")
    w.line(f"{y}.index_put_(({index},), {x.name}[:3] * 2, accumulate={w.rng.random() < 0.5})")
    return w.new(f"{y} * 0.5", x)


@op(*_ALL, weight=0.8)
def aliased(w: Writer, x: Value) -> Value | None:
    """A view that sees its base change."""
    if not x.fresh:
        return None
    view = w.name("view")
    w.line(f"{view} = {x.name}[:, 1:]")
    w.line(f"{x.name}.mul_(0.5)")
    return w.new(f"{x.name} + {view}.sum(1, keepdim=True) * 0.1", x)


@op(*_ALL, weight=0.6)
def written(w: Writer, x: Value) -> Value:
    y = w.name("c")
    w.line(f"{y} = torch.zeros_like({x.name})")
    w.line(f"{y}[:, ::2] = {x.name}[:, ::2]")
    w.line(f"{y}[:, 1::2] += {x.name}[:, 1::2].sigmoid()")
    return w.new(f"{y} + 0", x)


# -- what a module does besides ------------------------------------------------------------


@op("flat", "seq", "image", weight=0.8)
def running(w: Writer, x: Value) -> Value:
    """A buffer updated in the forward."""
    dim = {"flat": "0", "seq": "(0, 1)", "image": "(0, 2, 3)"}[x.kind]
    size = x.shape[1] if x.kind == "image" else x.shape[-1]
    mean = w.buffer(f"torch.zeros({size})")
    w.line(f"{mean}.mul_(0.9).add_({x.name}.detach().mean({dim}).to({mean}.dtype), alpha=0.1)")
    read = f"{mean}.view(-1, 1, 1)" if x.kind == "image" else mean
    return w.new(f"{x.name} - {read}.clone()" if w.rng.random() < 0.5 else f"{x.name} * 1.1", x)


@op(*_ALL, weight=0.5)
def counted(w: Writer, x: Value) -> Value:
    calls = w.buffer("torch.zeros(())")
    w.line(f"{calls}.add_(1)")
    return w.new(f"{x.name} * (1 + 0.01 * {calls}.clone())", x)


@op(*_ALL, weight=0.7)
def constant_scale(w: Writer, x: Value) -> Value:
    scale = w.name("s")
    w.line("with torch.no_grad():")
    w.line(f"    {scale} = {x.name}.abs().mean()")
    return w.new(f"{x.name} / (1 + {scale})", x)


@op(*_ALL, weight=0.7)
def detached(w: Writer, x: Value) -> Value:
    return w.new(f"{x.name} + torch.sigmoid({x.name}.detach())", x)


@op(*_ALL, weight=0.7)
def cast(w: Writer, x: Value) -> Value:
    dtype = w.rng.choice(("torch.float64", "torch.float64", "torch.bfloat16"))
    w.low_precision |= dtype == "torch.bfloat16"
    return w.new(f"torch.tanh({x.name}.to({dtype})).to({x.name}.dtype)", x)


@op(*_ALL, weight=0.7)
def custom_function(w: Writer, x: Value) -> Value:
    if w.rng.random() < 0.5:
        return w.new(f"{x.name} + Straight.apply({x.name}) * 0.1", x)
    return w.new(f"Scale.apply({x.name}, {w.parameter(1)})", x)


@op(*_ALL, weight=0.5)
def graph_break(w: Writer, x: Value) -> Value:
    w.line("torch._dynamo.graph_break()")
    return w.new(f"{x.name} * 1.25", x)


@op(*_ALL, weight=0.4)
def dead_branch(w: Writer, x: Value) -> None:
    w.line(f"unused = ({x.name} * 2).sum()")


# -- from one kind to another ------------------------------------------------------------


@op("flat", weight=0.7)
def to_seq(w: Writer, x: Value) -> Value | None:
    rows, width = x.shape
    if rows % 16 or width % 4:
        return None
    return w.new(f"{x.name}.view({rows // 16}, 16, {width})", x, (rows // 16, 16, width), kind="seq")


@op("seq", weight=0.8)
def to_flat(w: Writer, x: Value) -> Value:
    batch, length, width = x.shape
    if w.rng.random() < 0.7:
        return w.new(f"{x.name}.flatten(0, 1)", x, (batch * length, width), kind="flat")
    return w.new(f"{x.name}{w.rng.choice(('.mean(1)', '[:, -1]'))}", x, (batch, width), kind="flat")


@op("seq", weight=0.8)
def to_signal(w: Writer, x: Value) -> Value | None:
    batch, length, width = x.shape
    if width % 4:
        return None
    return w.new(f"{x.name}.transpose(1, 2)", x, (batch, width, length), kind="signal")


@op("signal", weight=0.8)
def signal_to_seq(w: Writer, x: Value) -> Value | None:
    batch, width, length = x.shape
    if width % 4:
        return None
    return w.new(f"{x.name}.transpose(1, 2)", x, (batch, length, width), kind="seq")


@op("image", weight=0.6)
def image_to_rows(w: Writer, x: Value) -> Value | None:
    batch, channels, height, width = x.shape
    if w.rng.random() < 0.5:
        return w.new(f"{x.name}.mean((2, 3))", x, (batch, channels), kind="flat")
    if channels % 4 or height * width > 64:
        return None
    return w.new(f"{x.name}.flatten(2).transpose(1, 2)", x, (batch, height * width, channels), kind="seq")


# -- a whole module ------------------------------------------------------------


def _inputs(w: Writer) -> dict[str, torch.Tensor]:
    """Arguments of the forward, as values of the writer and as tensors (drawn from torch's generator)."""
    rng, batch = w.rng, {}
    kind = rng.choice(("flat", "flat", "seq", "seq", "image", "image", "signal", "tokens"))
    if kind == "tokens":
        shape = (rng.choice((8, 16)), rng.choice((16, 32)))
        batch["ids"] = torch.randint(0, 50, shape)
        width = rng.choice((16, 32))
        w.line(f"x = {w.module(f'nn.Embedding(50, {width})')}(ids) * self.first")
        w.values.append(Value(name="x", shape=(*shape, width), kind="seq"))
        return batch
    shape = {
        "flat": (rng.choice((128, 256, 512)), rng.choice((16, 32, 48))),
        "seq": (rng.choice((8, 16)), rng.choice((16, 32)), rng.choice((16, 32))),
        "image": (rng.choice((4, 8)), rng.choice((8, 16)), *(rng.choice((8, 16)),) * 2),
        "signal": (rng.choice((8, 16)), rng.choice((8, 16)), 32),
    }[kind]
    for name in ("x", "y")[: 1 + (rng.random() < 0.2)]:
        batch[name] = torch.randn(shape)
        w.line(f"{name} = {name} * self.first")
        w.values.append(Value(name=name, shape=shape, kind=kind))
    return batch


def _layers(w: Writer, number: int) -> None:
    made = 0
    for _ in range(20 * number):
        if made == number:
            return
        recent = w.values[-1] if w.rng.random() < 0.75 else w.rng.choice(w.values)
        weights, functions = zip(*_OPS[recent.kind], strict=True)
        (function,) = w.rng.choices(functions, weights)
        if function(w, recent) is not None:
            recent.used, recent.fresh = True, False
            made += 1


def _outputs(w: Writer) -> tuple[str, int]:
    """The return expression and how many outputs it has: sinks, at times with something from the middle."""
    sinks = [v for v in w.values if not v.used] or [w.values[-1]]
    if len(sinks) > 1 and w.rng.random() < 0.3:
        sinks.pop(0)  # a branch that nothing reads
    if w.rng.random() < 0.2:
        sinks.append(w.rng.choice(w.values[1:] or w.values))
    names = list(dict.fromkeys(v.name for v in sinks))[-4:]
    if len(names) == 1:
        return names[0], 1
    if w.rng.random() < 0.5:
        return f"({', '.join(names)})", len(names)
    return "{" + ", ".join(f"{n!r}: {n}" for n in names) + "}", len(names)


@dataclass(frozen=True)
class Loss:
    """The loss of a module's output: of each tensor but those in `skipped`."""

    skipped: tuple[int, ...]
    classes: bool

    def __call__(self, output: Any) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves(output)
        total: Any = 0.0
        for position, leaf in enumerate(leaves):
            if position not in self.skipped:
                total = total + self.of(leaf.to(torch.promote_types(leaf.dtype, torch.float32)))
        return total

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        if self.classes and leaf.ndim == 2:
            return F.cross_entropy(leaf, leaf.new_zeros(leaf.shape[0], dtype=torch.long))
        return (leaf - 0.1).square().mean()


def build(seed: int, *, dtype: torch.dtype = torch.float32) -> Sample:
    """The module of a seed, with its batch, loss and optimizer: the same objects' twins at every call.

    `dtype=torch.float64` gives the same numbers in double precision (the reference for rounding).
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    w = Writer(rng)
    batch = _inputs(w)
    arguments = ", ".join(batch)
    _layers(w, rng.randint(4, 12))
    result, outputs = _outputs(w)
    source = "\n".join(
        [
            "class Module(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.first = nn.Parameter(torch.ones(1))",
            *(f"        {text}" for text in w.init),
            f"    def forward(self, {arguments}):",
            *(f"        {text}" for text in w.body),
            f"        return {result}",
        ]
    )
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Scale": Scale, "Straight": Straight}
    exec(compile(source, f"<fuzz {seed}>", "exec"), scope)
    torch.manual_seed(seed + 1)
    model = scope["Module"]().to(dtype)
    skipped = (rng.randrange(outputs),) if outputs > 1 and rng.random() < 0.4 else ()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if rng.random() < 0.5:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=rng.choice((0.0, 0.9)))
    return Sample(
        seed=seed,
        source=source,
        model=model,
        batch={k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()},
        loss=Loss(skipped=skipped, classes=rng.random() < 0.5),
        optimizer=optimizer,
        autocast=rng.random() < 0.08,
        low_precision=w.low_precision,
        budget_draw=rng.uniform(-0.12, 1.12),
    )
