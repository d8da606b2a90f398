"""A decoder's weights: checked by Hugging Face parameter name, and fused for few large products.

    q_proj ┐                     gate_proj ┐
    k_proj ├─▶ qkv [I, O]        up_proj   ┴─▶ gate_up [I, O]
    v_proj ┘

Matrices are stored [in, out], the layout that multiplies fastest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.engines.torch.architecture import Architecture
from storage.errors import ConfigError
from storage.records.weights import HostTensor

NAMES_SHOWN_MAX = 3
"""Tensor names that an error message lists."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWeights:
    """Weights of one layer."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[hidden, (heads + 2·kv_heads)·head_dim]: queries, keys, values."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the query norm per query head, then the key norm per key head.
    """
    output: Tensor
    """[heads·head_dim, hidden]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Tensor
    """[hidden, 2·intermediate]"""
    down: Tensor
    """[intermediate, hidden]"""


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """Weights of all layers, the embedding and the output projection."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[hidden]"""
    head: Tensor
    """[hidden, vocab]"""


def fuse(
    architecture: Architecture,
    tensors: Mapping[str, HostTensor],
    device: torch.device,
    dtype: torch.dtype,
) -> DecoderWeights:
    """Convert and fuse tensors for `Decoder`.

    Raises:
        ConfigError: a tensor is missing, unknown to the model, or of another shape or dtype.
    """
    if architecture.layers > len(tensors):  # a config.json may have as many as a vocabulary
        raise ConfigError(
            f"the model's config.json requires {architecture.layers:,} layers; the weights have "
            f"{len(tensors):,} tensors; are they of this model?"
        )
    shapes = parameter_shapes(architecture)
    ignored = {"lm_head.weight"} if architecture.tied else set()
    _refuse_names("requires", "lack", shapes.keys() - tensors.keys())
    _refuse_names("does not have", "hold", tensors.keys() - shapes.keys() - ignored)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"weights: {name} has shape {tensors[name].shape}; the model's config.json "
                f"requires {shape}"
            )
    loaded = {name: to_torch(tensors[name], device, dtype) for name in shapes}
    embedding = loaded["model.embed_tokens.weight"]
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _fuse_layer(architecture, loaded, f"model.layers.{layer}")
            for layer in range(architecture.layers)
        ),
        norm=loaded["model.norm.weight"],
        head=(embedding if architecture.tied else loaded["lm_head.weight"]).t().contiguous(),
    )


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model by its Hugging Face name."""
    a = architecture
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (a.vocab, a.hidden),
        "model.norm.weight": (a.hidden,),
    }
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocab, a.hidden)
    for layer in range(a.layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (
            a.hidden,
        )
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, a.hidden)
            if a.qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if a.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (
                a.head_dim,
            )
        shapes[f"{at}.self_attn.o_proj.weight"] = (a.hidden, queries)
        if a.output_bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (a.hidden,)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (
            a.intermediate,
            a.hidden,
        )
        shapes[f"{at}.mlp.down_proj.weight"] = (a.hidden, a.intermediate)
    return shapes


def to_torch(tensor: HostTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Convert a bit pattern to a tensor of the compute dtype that shares no memory with it."""
    views = {
        "BF16": (np.int16, torch.bfloat16),
        "F16": (np.int16, torch.float16),
        "F32": (np.int32, torch.float32),
    }
    if tensor.dtype not in views:
        raise ConfigError(
            f"weights: a tensor has dtype {tensor.dtype}; the torch engine reads {', '.join(views)}"
        )
    as_integer, as_float = views[tensor.dtype]
    bits = torch.from_numpy(tensor.bits.view(as_integer).copy())
    return bits.view(as_float).reshape(tensor.shape).to(device, dtype)


def _fuse_layer(architecture: Architecture, loaded: Mapping[str, Tensor], at: str) -> LayerWeights:
    a = architecture

    def joined(kind: str, names: Iterable[str]) -> Tensor:
        return torch.cat([loaded[f"{at}.{name}_proj.{kind}"] for name in names])

    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    qk_norm = None
    if a.qk_norm:
        query_norm, key_norm = (loaded[f"{at}.self_attn.{name}_norm.weight"] for name in ("q", "k"))
        qk_norm = torch.cat((query_norm.expand(a.heads, -1), key_norm.expand(a.kv_heads, -1)))
    return LayerWeights(
        input_norm=loaded[f"{at}.input_layernorm.weight"],
        qkv=joined("weight", qkv).t().contiguous(),
        qkv_bias=joined("bias", qkv) if a.qkv_bias else None,
        qk_norm=qk_norm,
        output=joined("weight", ["self_attn.o"]).t().contiguous(),
        output_bias=loaded[f"{at}.self_attn.o_proj.bias"] if a.output_bias else None,
        mlp_norm=loaded[f"{at}.post_attention_layernorm.weight"],
        gate_up=joined("weight", ("mlp.gate", "mlp.up")).t().contiguous(),
        down=loaded[f"{at}.mlp.down_proj.weight"].t().contiguous(),
    )


def _refuse_names(relation: str, verb: str, names: Iterable[str]) -> None:
    """Raise ConfigError if there are any `names`, and list the first of them."""
    wrong = sorted(names)
    if wrong:
        more = f" and {len(wrong) - NAMES_SHOWN_MAX} more" if len(wrong) > NAMES_SHOWN_MAX else ""
        shown = ", ".join(wrong[:NAMES_SHOWN_MAX]) + more
        raise ConfigError(
            f"weights {verb} {shown}, which the model's config.json {relation}; are they of this "
            "model?"
        )
