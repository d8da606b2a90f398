"""Shapes of models with random weights, and the arithmetic that a model needs for given tokens.

    tiny                 hidden size 128, 4 layers, a vocabulary of 512
    0.6b, 1.7b, 8b       the shapes of Qwen3

MFU (model FLOPs utilization, PaLM, arXiv 2204.02311, appendix B) is the share of the devices' peak
that is arithmetic of the model:

    MFU = FLOPs / (seconds · devices · peak FLOP/s)

    forward pass     2·(T·P + N·V·H) + 2·L·A·Σ len²
    training step    3 · forward pass (the backward pass has two products for each of the forward)

Causal attention of a row of `len` tokens: len²/2 pairs of tokens, 2 products of width A, 2 FLOPs.
Padding, and what activation checkpointing computes again, does not count.

Legend: T tokens, N tokens to which the output head is applied, P weights of the layers, V
vocabulary, H hidden size, L layers, A width of all query heads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from storage.formats.model_sizes import ModelSizes
from storage.records.types import Json
from storage.records.weights import HostTensor

DEVIATION = 0.02
"""Standard deviation of random weights; vectors (norms) are 1."""
DRAWN = 2**22
"""Random numbers that are drawn; larger tensors repeat them."""
ONE_BF16 = 0x3F80
"""The bits of 1.0."""
PEAK_TFLOPS = MappingProxyType({"B200": 2250, "H200": 989, "H100": 989, "L40S": 362, "A100": 312})
"""Dense bf16 products of a device, by a part of its name, in TFLOP/s (of the data sheets)."""


@dataclass(frozen=True, kw_only=True)
class WorkSizes:
    """Sizes of the measured work: prompts and answers, and a micro-batch of training."""

    prompt_tokens: int
    """Mean length; prompts have half of it to one and a half."""
    answer_tokens: int
    """Median length."""
    answer_tokens_max: int
    micro_batch_tokens: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's `config.json`, and work of a fitting size."""

    config: Json
    work: WorkSizes

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.config)


def _qwen3(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: object
) -> Json:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        **others,
    }


_REAL = WorkSizes(
    prompt_tokens=256, answer_tokens=512, answer_tokens_max=2048, micro_batch_tokens=16_384
)
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": ModelShape(
            config=_qwen3(
                128, 4, 4, 2, 384, vocab_size=512, head_dim=32, max_position_embeddings=4096
            ),
            work=WorkSizes(
                prompt_tokens=16,
                answer_tokens=48,
                answer_tokens_max=256,
                micro_batch_tokens=2048,
            ),
        ),
        "0.6b": ModelShape(config=_qwen3(1024, 28, 16, 8, 3072), work=_REAL),
        "1.7b": ModelShape(config=_qwen3(2048, 28, 16, 8, 6144), work=_REAL),
        "8b": ModelShape(
            config=_qwen3(4096, 36, 32, 8, 12_288, tie_word_embeddings=False), work=_REAL
        ),
    }
)


def tensor_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a model by name, tied ones once; allocates no memory for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]  # theirs
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, HostTensor]:
    """Return bf16 weights: normal matrices, vectors of ones. Large tensors repeat their numbers."""
    normal = np.random.default_rng(seed).normal(0, DEVIATION, DRAWN).astype(np.float32)
    drawn = (normal.view(np.uint32) >> 16).astype(np.uint16)
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if len(shape) < 2:
            bits = np.full(shape, ONE_BF16, dtype=np.uint16)
        else:
            bits = np.resize(np.roll(drawn, 7919 * number), shape)
        weights[name] = HostTensor("BF16", shape, bits)
    return weights


def changed(weights: Mapping[str, HostTensor], share: float, seed: int) -> dict[str, HostTensor]:
    """Return copies in which about `share` of the elements differ in their last bit."""
    draw = np.random.default_rng(seed)
    result = {}
    for name, tensor in weights.items():
        bits = tensor.bits.copy()
        count = max(1, round(share * bits.size))
        bits.reshape(-1)[draw.integers(0, bits.size, count)] ^= np.uint16(1)
        result[name] = HostTensor(tensor.dtype, tensor.shape, bits)
    return result


def forward_flops(config: Json, lengths: Iterable[int], head_tokens: int) -> float:
    """Return the FLOPs of a forward pass over rows of these lengths (formula: module)."""
    rows = np.array(list(lengths), dtype=np.float64)
    sizes = ModelSizes.of(config)
    embeddings = sizes.vocab * sizes.hidden * (1 if config["tie_word_embeddings"] else 2)
    head = sizes.vocab * sizes.hidden
    width = config["num_attention_heads"] * config["head_dim"]
    products = rows.sum() * (sizes.parameters - embeddings) + head_tokens * head
    return float(2 * products + 2 * sizes.layers * width * (rows**2).sum())


def peak_flops(device_name: str) -> float | None:
    """Return the bf16 peak of one device in FLOP/s; None for a device that is not listed."""
    known = (tflops for part, tflops in PEAK_TFLOPS.items() if part in device_name)
    return next((1e12 * tflops for tflops in known), None)
