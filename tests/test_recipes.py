"""The demo's parts, and the demo itself on a tiny model."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
MODULES = ("demo", "display", "dynamic", "experts", "findings", "gpt", "paired", "stdlib_data", "trees")


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_text_is_python_source_and_always_the_same():
    from stdlib_data import stdlib_text

    text = stdlib_text(300_000)
    assert len(text) == 300_000
    assert text == stdlib_text(300_000) == stdlib_text(400_000)[:300_000]
    assert b"\nimport " in text
    assert b"site-packages" not in text[:1000]


def test_windows_are_side_by_side_with_their_next_bytes():
    from stdlib_data import ByteWindows

    windows = ByteWindows(bytes(range(10)), sequence=3)
    assert [(x.tolist(), y.tolist()) for x, y in windows] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, 9]),
    ]
    assert windows[0][0].dtype == torch.int64


def test_batches_come_in_the_same_order_whatever_else_is_drawn():
    from stdlib_data import stdlib_loader

    first = next(iter(stdlib_loader(batch=2, sequence=16)))
    torch.rand(7)
    again = next(iter(stdlib_loader(batch=2, sequence=16)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = next(iter(stdlib_loader(batch=2, sequence=16, seed=1)))
    assert not torch.equal(first[0], other[0])


def test_the_model_is_the_size_that_is_claimed_and_causal():
    from gpt import ByteGPT, next_byte_loss

    model = ByteGPT()
    assert sum(p.numel() for p in model.parameters()) * 4 == 19_742_720
    model = ByteGPT(layers=1, width=16, heads=2, sequence=8).eval()
    tokens = torch.arange(16).reshape(2, 8)
    logits = model(tokens)
    assert logits.shape == (2, 8, 256)
    changed = tokens.clone()
    changed[:, 5:] = 99
    assert torch.equal(model(changed)[:, :5], logits[:, :5])
    assert next_byte_loss(logits, tokens).shape == ()


@pytest.mark.slow
def test_the_demo_on_a_tiny_model(tmp_path, monkeypatch, capfd):
    pytest.importorskip("lightning")
    pytest.importorskip("matplotlib")
    import demo
    from rich.console import Console

    tiny = functools.partial(demo.LitGPT, layers=3, width=64, heads=4, sequence=64)
    monkeypatch.setattr(demo, "LitGPT", tiny)
    loader = functools.partial(demo.stdlib_loader, batch=4, sequence=64)
    monkeypatch.setattr(demo, "stdlib_loader", loader)
    monkeypatch.setattr(demo, "RUN_DIR", tmp_path)
    monkeypatch.setattr(demo, "STEPS", 6)
    monkeypatch.setattr(demo, "PAIRS", 6)
    code = demo.main(Console(width=110))
    said = capfd.readouterr().out
    assert code == 0, said
    assert "FAILS" not in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "peaks-rank0.jsonl",
        "plan-rank0.json",
        "memory.svg",
    }
    peaks = [json.loads(line) for line in (tmp_path / "peaks-rank0.jsonl").read_text().splitlines()]
    assert [peak["step"] for peak in peaks] == [2, 5]
    assert all(peak["peak_allocated_bytes"] <= peak["budget_bytes"] for peak in peaks)
    assert "saved activations" in said
    assert "95 % interval" in said


def test_the_trees_are_those_of_the_library_and_a_tree_has_its_loss():
    pytest.importorskip("lightning")
    from trees import KINDS, TreeLSTM, size, syntax_trees

    trees = list(syntax_trees(40, 3))
    assert len(trees) == 3
    assert trees == list(syntax_trees(40, 3))
    assert all(20 <= size(tree) <= 40 and KINDS[tree[0]] == "FunctionDef" for tree in trees)
    net = TreeLSTM(width=8, readers=2).eval()
    assert abs(net(trees[0]).item() - torch.tensor(len(KINDS)).log().item()) < 1.0


def test_each_token_goes_to_the_expert_that_it_chose():
    pytest.importorskip("lightning")
    from experts import Experts
    from torch.nn import functional

    torch.manual_seed(0)
    layer, x = Experts(8, 3), torch.randn(2, 5, 8)
    tokens = layer.norm(x).flatten(0, 1)
    weights, choice = layer.router(tokens).softmax(-1).max(-1)
    each = [
        layer.down[k](functional.gelu(layer.up[k](token))) * w
        for token, k, w in zip(tokens, choice, weights, strict=True)
    ]
    assert torch.allclose(layer(x), x + torch.stack(each).view_as(x), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["trees", "experts"])
def test_what_cannot_be_planned_trains_under_half_of_its_peak(what, capfd):
    pytest.importorskip("lightning")
    import dynamic

    assert dynamic.main(what, small=True) == 0, capfd.readouterr().out
