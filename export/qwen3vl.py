"""Qwen3-VL's sizes, tensor names and shapes, as transformers and llama.cpp's converter read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The numbers that make one Qwen3-VL different from another.

    Attributes:
        hidden: Width of the text model.
        layers: Its depth.
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Width of a head.
        intermediate: Width of its feed-forward layer.
        vision_hidden: Width of the vision encoder; a multiple of ``vision_heads``.
        vision_depth: Its depth.
        vision_heads: Its heads.
        vision_intermediate: Width of its feed-forward layer.
        deepstack: Encoder layers whose features also enter the first layers of the text model, one each.
        vocabulary: Rows of the embedding, which is also the output layer.
        context: Longest prompt in tokens that the file promises.
        positions: Learned positions of the encoder; a square number.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vision_hidden: int
    vision_depth: int
    vision_heads: int
    vision_intermediate: int
    deepstack: tuple[int, ...]
    vocabulary: int
    context: int = 32768
    positions: int = 2304

    @property
    def mrope_sections(self) -> list[int]:
        """Pairs of a head's rotary channels for time, height and width, in Qwen's proportions."""
        side = self.head_dim // 2 * 20 // 64
        return [self.head_dim // 2 - 2 * side, side, side]


#: Sizes of real checkpoints.
QWEN3_VL_2B = Sizes(
    hidden=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=6144,
    vision_hidden=1024,
    vision_depth=24,
    vision_heads=16,
    vision_intermediate=4096,
    deepstack=(5, 11, 17),
    vocabulary=151936,
    context=262144,
)

_PATCH = 16
_TEMPORAL = 2
_MERGE = 2


def config(sizes: Sizes, ids: dict[str, int], dtype: str = "float16") -> dict[str, Any]:
    """The model's ``config.json``.

    Args:
        sizes: Numbers of the model.
        ids: Ids of the special tokens by their text.
        dtype: Type of the stored weights.
    """
    s = sizes
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": dtype,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": dtype,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "hidden_act": "silu",
            "hidden_size": s.hidden,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "intermediate_size": s.intermediate,
            "max_position_embeddings": s.context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": s.mrope_sections,
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": s.vocabulary,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": s.vision_hidden,
            "depth": s.vision_depth,
            "num_heads": s.vision_heads,
            "intermediate_size": s.vision_intermediate,
            "out_hidden_size": s.hidden,
            "deepstack_visual_indexes": list(s.deepstack),
            "in_channels": 3,
            "patch_size": _PATCH,
            "temporal_patch_size": _TEMPORAL,
            "spatial_merge_size": _MERGE,
            "num_position_embeddings": s.positions,
        },
    }


def preprocessor_config() -> dict[str, Any]:
    """The image processor's ``preprocessor_config.json``."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": _PATCH,
        "temporal_patch_size": _TEMPORAL,
        "merge_size": _MERGE,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors, in transformers' order and layout.

    The output layer is tied to the embedding and not stored.
    """
    s = sizes
    out: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"] = (rows, columns)
        out[f"{name}.bias"] = (rows,)

    def norm(name: str, width: int) -> None:
        out[f"{name}.weight"] = (width,)
        out[f"{name}.bias"] = (width,)

    vision = "model.visual"
    wide = s.vision_hidden * _MERGE * _MERGE
    out[f"{vision}.patch_embed.proj.weight"] = (s.vision_hidden, 3, _TEMPORAL, _PATCH, _PATCH)
    out[f"{vision}.patch_embed.proj.bias"] = (s.vision_hidden,)
    out[f"{vision}.pos_embed.weight"] = (s.positions, s.vision_hidden)
    for i in range(s.vision_depth):
        block = f"{vision}.blocks.{i}"
        norm(f"{block}.norm1", s.vision_hidden)
        norm(f"{block}.norm2", s.vision_hidden)
        linear(f"{block}.attn.qkv", 3 * s.vision_hidden, s.vision_hidden)
        linear(f"{block}.attn.proj", s.vision_hidden, s.vision_hidden)
        linear(f"{block}.mlp.linear_fc1", s.vision_intermediate, s.vision_hidden)
        linear(f"{block}.mlp.linear_fc2", s.vision_hidden, s.vision_intermediate)
    # The main merger normalises before it joins four patches, the deepstack mergers after.
    mergers = [(f"{vision}.merger", s.vision_hidden)]
    mergers += [(f"{vision}.deepstack_merger_list.{i}", wide) for i in range(len(s.deepstack))]
    for merger, width in mergers:
        norm(f"{merger}.norm", width)
        linear(f"{merger}.linear_fc1", wide, wide)
        linear(f"{merger}.linear_fc2", s.hidden, wide)

    text = "model.language_model"
    out[f"{text}.embed_tokens.weight"] = (s.vocabulary, s.hidden)
    for i in range(s.layers):
        layer = f"{text}.layers.{i}"
        out[f"{layer}.self_attn.q_proj.weight"] = (s.heads * s.head_dim, s.hidden)
        out[f"{layer}.self_attn.k_proj.weight"] = (s.kv_heads * s.head_dim, s.hidden)
        out[f"{layer}.self_attn.v_proj.weight"] = (s.kv_heads * s.head_dim, s.hidden)
        out[f"{layer}.self_attn.o_proj.weight"] = (s.hidden, s.heads * s.head_dim)
        out[f"{layer}.self_attn.q_norm.weight"] = (s.head_dim,)
        out[f"{layer}.self_attn.k_norm.weight"] = (s.head_dim,)
        out[f"{layer}.mlp.gate_proj.weight"] = (s.intermediate, s.hidden)
        out[f"{layer}.mlp.up_proj.weight"] = (s.intermediate, s.hidden)
        out[f"{layer}.mlp.down_proj.weight"] = (s.hidden, s.intermediate)
        out[f"{layer}.input_layernorm.weight"] = (s.hidden,)
        out[f"{layer}.post_attention_layernorm.weight"] = (s.hidden,)
    out[f"{text}.norm.weight"] = (s.hidden,)
    return out
