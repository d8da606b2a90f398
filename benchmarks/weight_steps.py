"""Weights before and after one training step, for the benchmarks of deltas: synthetic or trained.

A synthetic step is one of Adam on fp32 masters, published in bf16: normal weights of deviation
0.02, updates of lr · clip(N(0, 0.6), ±1.5). The learning rate is chosen so that a given share of
the elements changes.
"""

import math
from typing import Any

import numpy as np

CHUNK = 2**22
DEVIATION, UPDATE_DEVIATION, UPDATE_MAX = 0.02, 0.6, 1.5
"""The learning rate is fitted to these values."""


def synthetic(elements: int, changed: float, seed: int) -> tuple[Any, Any, float]:
    """Return bf16 bits [elements] before and after a step, and its learning rate.

    The step changes about the share `changed` of the elements.
    """
    lr = _lr_for(changed, seed)
    old, new = np.empty(elements, dtype=np.uint16), np.empty(elements, dtype=np.uint16)
    for number, start in enumerate(range(0, elements, CHUNK)):
        part = slice(start, min(start + CHUNK, elements))
        old[part], new[part] = _step(part.stop - start, lr, [seed, number])
    return old, new, lr


def bf16(values: Any) -> Any:
    """Round float32 to nearest even; return the bits of bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def trained(
    lr: float, seed: int, hidden: int = 512, layers: int = 6, steps: int = 24, batch: int = 32
) -> tuple[Any, Any]:
    """Train a Qwen3 model with fp32 masters on chained additions by AdamW.

    Returns the bf16 bits of all parameters, concatenated, before and after the last of `steps`
    steps. The first half of the steps has the learning rate 3e-4, so that the model is no longer
    random.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tasks.base_models.tiny_demonstrations import Habits, demonstrations
    from tasks.base_models.tiny_tokenizer import tokenizer

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
    )
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99))
    stream = demonstrations(Habits(), seed)
    old = new = np.zeros(0, dtype=np.uint16)
    for step in range(steps):
        if step == steps // 2:
            for group in optimizer.param_groups:
                group["lr"] = lr
        examples = [torch.from_numpy(next(stream).tokens).long() for _ in range(batch)]
        tokens = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=-100)
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        old, new = (
            new,
            np.concatenate(
                [bf16(parameter.detach().numpy().reshape(-1)) for parameter in model.parameters()]
            ),
        )
    return old, new


def _step(size: int, lr: float, seed: list[int]) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    masters = draw.standard_normal(size, dtype=np.float32) * np.float32(DEVIATION)
    update = np.clip(
        draw.standard_normal(size, dtype=np.float32) * np.float32(UPDATE_DEVIATION),
        -UPDATE_MAX,
        UPDATE_MAX,
    )
    return bf16(masters), bf16(masters - np.float32(lr) * update)


def _lr_for(changed: float, seed: int) -> float:
    low, high = 1e-10, 1e-2
    for _ in range(40):
        lr = math.sqrt(low * high)
        old, new = _step(2**20, lr, [seed, 2**31])
        low, high = (lr, high) if (old != new).mean() < changed else (low, lr)
    return lr
