"""Families of the zoo that read text: decoders, encoders, encoder-decoders, recurrent ones, a mixture of
experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from zoo_families import Family, register

VOCABULARY = 512


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (batch, length))


def _language(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    """Tokens that are their own labels."""

    def make() -> dict[str, Any]:
        tokens = _tokens(batch, length)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _padded(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    """The same with an attention mask; every other row ends in padding."""

    def make() -> dict[str, Any]:
        tokens = _tokens(batch, length)
        mask = torch.ones_like(tokens)
        mask[::2, length * 3 // 4 :] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return make


def _model(kind: Any, config: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: kind(config())


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

register(
    Family(
        name="gpt2",
        make=_model(
            hf.GPT2LMHeadModel,
            lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=128, n_layer=3, n_head=4),
        ),
        batch=_padded(8, 128),
    )
)
register(
    Family(
        name="llama",
        make=_model(hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**_DECODER, num_key_value_heads=2)),
        batch=_language(8, 128),
    )
)
