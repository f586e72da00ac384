"""Families of the zoo that read text: decoders, encoders, encoder-decoders, recurrent ones, a mixture of
experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from zoo_families import Family, fewer_layers, register

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


def _classified(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    """Padded sequences of one class each."""

    def make() -> dict[str, Any]:
        inputs = _padded(batch, length)()
        return {**inputs, "labels": torch.randint(0, 2, (batch,))}

    return make


def _translated(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    """A padded source and a target of its own length."""

    def make() -> dict[str, Any]:
        return {**_padded(batch, length)(), "labels": _tokens(batch, length * 3 // 4)}

    return make


def _add(name: str, kind: Any, config: Callable[[], Any], batch: Any, note: str = "") -> None:
    register(
        Family(
            name=name, make=lambda: kind(config()), batch=batch, note=note, small=fewer_layers(kind, config)
        )
    )


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_ENCODER = {**_DECODER, "intermediate_size": 512, "hidden_size": 128}

_add(
    "gpt2",
    hf.GPT2LMHeadModel,
    lambda: hf.GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=128, n_layer=3, n_head=4),
    _padded(8, 128),
    "tied head, dropout",
)
_add("gpt_neox", hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**_DECODER), _language(8, 128))
_add(
    "llama",
    hf.LlamaForCausalLM,
    lambda: hf.LlamaConfig(**_DECODER, num_key_value_heads=2),
    _padded(8, 128),
    "grouped queries",
)
_add(
    "qwen2",
    hf.Qwen2ForCausalLM,
    lambda: hf.Qwen2Config(**_DECODER, num_key_value_heads=2),
    _language(8, 128),
)
_add(
    "gemma",
    hf.GemmaForCausalLM,
    lambda: hf.GemmaConfig(**_DECODER, num_key_value_heads=1, head_dim=32),
    _language(8, 128),
    "tied head",
)
_add("phi", hf.PhiForCausalLM, lambda: hf.PhiConfig(**_DECODER), _language(8, 128))
_add(
    "mixtral",
    hf.MixtralForCausalLM,
    lambda: hf.MixtralConfig(
        **{**_DECODER, "intermediate_size": 192, "num_hidden_layers": 2},
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    ),
    _language(8, 128),
    "mixture of experts",
)
_add(
    "mamba",
    hf.MambaForCausalLM,
    lambda: hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8),
    _language(8, 24),
    "sequential scan",
)
_add(
    "rwkv",
    hf.RwkvForCausalLM,
    lambda: hf.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, attention_hidden_size=128
    ),
    _language(32, 8),
    "recurrent",
)
_add("bert", hf.BertForMaskedLM, lambda: hf.BertConfig(**_ENCODER), _padded(8, 128), "tied head, dropout")
_add(
    "roberta",
    hf.RobertaForSequenceClassification,
    lambda: hf.RobertaConfig(**_ENCODER),
    _classified(8, 128),
    "dropout",
)
_add(
    "deberta_v2",
    hf.DebertaV2ForMaskedLM,
    lambda: hf.DebertaV2Config(
        **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32
    ),
    _padded(8, 96),
    "relative attention",
)
_add(
    "electra",
    hf.ElectraForPreTraining,
    lambda: hf.ElectraConfig(**_ENCODER, embedding_size=64),
    lambda: {**_padded(8, 128)(), "labels": torch.randint(0, 2, (8, 128))},
    "dropout",
)
_add(
    "t5",
    hf.T5ForConditionalGeneration,
    lambda: hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=384,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    _translated(8, 96),
    "encoder and decoder, dropout",
)
_add(
    "bart",
    hf.BartForConditionalGeneration,
    lambda: hf.BartConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=384,
        decoder_ffn_dim=384,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
    _translated(8, 96),
    "encoder and decoder, dropout",
)
