"""Families of the zoo that see or listen, alone or beside text.

Every family keeps its own defaults (dropout, drop path, layerdrop, masking of time steps, BatchNorm); only
widths, depths and inputs are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from zoo_families import Family, fewer_layers, register

CLASSES = 10
VOCABULARY = 512
IMAGE_TOKEN = VOCABULARY - 1


def _images(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def _labelled(batch: int, size: int) -> Callable[[], dict[str, Any]]:
    """Images of one class each."""
    return lambda: {"pixel_values": _images(batch, size), "labels": torch.randint(0, CLASSES, (batch,))}


def _segmented(batch: int, size: int) -> Callable[[], dict[str, Any]]:
    """Images with a class for each pixel."""
    return lambda: {
        "pixel_values": _images(batch, size),
        "labels": torch.randint(0, CLASSES, (batch, size, size)),
    }


def _detected(batch: int, size: int) -> Callable[[], dict[str, Any]]:
    """Images with one to three boxes each: a list of dicts of different lengths."""

    def make() -> dict[str, Any]:
        labels = [
            {"class_labels": torch.randint(0, CLASSES, (n,)), "boxes": 0.2 + 0.3 * torch.rand(n, 4)}
            for n in (1 + i % 3 for i in range(batch))
        ]
        return {"pixel_values": _images(batch, size), "labels": labels}

    return make


def _captioned(batch: int, size: int, length: int) -> Callable[[], dict[str, Any]]:
    """Images and texts that end in the last token, to be told apart."""

    def make() -> dict[str, Any]:
        ids = torch.randint(0, VOCABULARY - 1, (batch, length))
        ids[:, -1] = VOCABULARY - 1
        return {"input_ids": ids, "pixel_values": _images(batch, size), "return_loss": True}

    return make


def _illustrated(batch: int, size: int, length: int, image_tokens: int) -> Callable[[], dict[str, Any]]:
    """Texts with an image in them."""

    def make() -> dict[str, Any]:
        ids = torch.randint(0, IMAGE_TOKEN, (batch, length))
        ids[:, 4 : 4 + image_tokens] = IMAGE_TOKEN
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        mask = torch.ones_like(ids)
        return {
            "input_ids": ids,
            "pixel_values": _images(batch, size),
            "attention_mask": mask,
            "labels": labels,
        }

    return make


def _transcribed(batch: int, samples: int, length: int) -> Callable[[], dict[str, Any]]:
    """Sound waves and what is said in them."""
    return lambda: {
        "input_values": torch.randn(batch, samples),
        "labels": torch.randint(1, 32, (batch, length)),
    }


def _add(name: str, kind: Any, config: Callable[[], Any], batch: Any, note: str = "") -> None:
    one_stack = "num_hidden_layers" in config().to_dict()
    register(
        Family(
            name=name,
            make=lambda: kind(config()),
            batch=batch,
            note=note,
            small=fewer_layers(kind, config) if one_stack else None,
        )
    )


_TRANSFORMER: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_VISION: dict[str, Any] = {**_TRANSFORMER, "image_size": 64, "patch_size": 8}
_ENCODER_DECODER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}


def _backbone() -> Any:
    return hf.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )


_add(
    "vit",
    hf.ViTForImageClassification,
    lambda: hf.ViTConfig(**_VISION, num_labels=CLASSES),
    _labelled(16, 64),
)
_add(
    "swin",
    hf.SwinForImageClassification,
    lambda: hf.SwinConfig(
        image_size=90,
        patch_size=3,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        num_labels=CLASSES,
    ),
    _labelled(4, 90),
    "drop path; 30 × 30 patches are no multiple of the window: padded",
)
_add(
    "convnext",
    hf.ConvNextForImageClassification,
    lambda: hf.ConvNextConfig(
        hidden_sizes=[24, 48, 96, 128], depths=[2, 2, 3, 2], image_size=96, num_labels=CLASSES
    ),
    _labelled(16, 96),
    "depthwise convolutions",
)
_add(
    "segformer",
    hf.SegformerForSemanticSegmentation,
    lambda: hf.SegformerConfig(
        hidden_sizes=[16, 32, 48, 64],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=64,
        num_labels=CLASSES,
    ),
    _segmented(8, 96),
    "drop path, BatchNorm",
)
_add(
    "detr",
    hf.DetrForObjectDetection,
    lambda: hf.DetrConfig(
        backbone_config=_backbone(),
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        **_ENCODER_DECODER,
        num_queries=20,
        num_labels=CLASSES,
    ),
    _detected(6, 128),
    "the loss matches boxes with scipy",
)
_add(
    "clip",
    hf.CLIPModel,
    lambda: hf.CLIPConfig(
        text_config={
            **_TRANSFORMER,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config=_VISION,
        projection_dim=32,
    ),
    _captioned(16, 64, 32),
    "two towers, a contrastive loss",
)
_add(
    "whisper",
    hf.WhisperForConditionalGeneration,
    lambda: hf.WhisperConfig(
        **_ENCODER_DECODER,
        vocab_size=VOCABULARY,
        max_source_positions=200,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    lambda: {
        "input_features": torch.randn(8, 80, 400),
        "labels": torch.randint(3, VOCABULARY, (8, 48)),
    },
    "encoder over a spectrogram, decoder over text",
)
_add(
    "wav2vec2",
    hf.Wav2Vec2ForCTC,
    lambda: hf.Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        conv_dim=(32,) * 4,
        conv_kernel=(10, 3, 3, 3),
        conv_stride=(5, 4, 4, 2),
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
    ),
    _transcribed(4, 16000, 12),
    "layers dropped at random, time steps masked by numpy, CTC",
)
_add(
    "llava",
    hf.LlavaForConditionalGeneration,
    lambda: hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**{**_VISION, "hidden_size": 64, "intermediate_size": 256}),
        text_config=hf.LlamaConfig(
            **{**_TRANSFORMER, "intermediate_size": 256},
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=256,
        ),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=64,
    ),
    _illustrated(6, 64, 96, 64),
    "vision and language; image features are put where the tokens say",
)
