"""A model of a few thousand parameters, batches for it, and log-probabilities by the simplest
possible computation.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.runs.builders import batch, row
from trainer.config import TrainConfig
from trainer.engines.torch.hf.building import auto_classes
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.host_tensors import to_host, to_torch
from trainer.losses import PpoClip

AutoConfig, AutoModelForCausalLM = auto_classes()
VOCAB = 24
MODEL_CONFIG: Json = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
REGIONS = ("us-east", "eu", "")
PPO = PpoClip()
LINEAR = TrainConfig(
    loss=PPO, lr=1e4, eps=1e4, betas=(0.0, 0.0), weight_decay=0.0, grad_clip=1e9, publish_dtype="F32",
    normalize_advantages=False, micro_batch_tokens=4096,
)  # fmt: skip
"""Adam that is plain gradient descent to a relative 1e-4 (10⁴·g / (|g| + 10⁴)): weights show
gradients.
"""
SCALAR_CODE = ("ATEN_CPU_CAPABILITY", "default")
"""Environment variable with which torch compiles code without vector instructions, in less time."""


def base_weights(seed: int = 0, config: Json = MODEL_CONFIG) -> dict[str, HostTensor]:
    """Random published weights (BF16) with the tied head once, large enough for predictions that
    are far from uniform.
    """
    drawn = _drawn(seed, json.dumps(config))
    return {name: replace(each, bits=each.bits.copy()) for name, each in drawn.items()}


@cache
def _drawn(seed: int, config: str) -> dict[str, HostTensor]:
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(config)), dtype=torch.float32
    )
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        weights[name] = to_host(1.0 + 0.1 * noise if parameter.dim() < 2 else 0.3 * noise, "BF16")
    return weights


def reference_model(
    weights: Mapping[str, HostTensor], config: Json = MODEL_CONFIG
) -> torch.nn.Module:
    """The same model in unmodified transformers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    state = {name: to_torch(tensor).float() for name, tensor in weights.items()}
    model.load_state_dict(state, strict=False)
    return model


def reference_logprobs(model: torch.nn.Module, sample: BatchRow) -> torch.Tensor:
    """[L−1] log-probability of each token except the first: one row, no padding, all logits."""
    tokens = torch.tensor(sample.tokens).long()
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / sample.temperature, dim=-1).gather(1, tokens[1:, None])[:, 0]


def sampled_batch(
    model: torch.nn.Module,
    step: int = 1,
    num_rows: int = 6,
    noise: float = 0.0,
    temperature: float = 1.0,
) -> Batch:
    """Rows of 4 to 14 random tokens whose behaviour is `model`, up to `noise` in each
    log-probability.

    Two regions and an unknown one sampled them; from step 2 on, the version before the newest
    sampled the first token of every third row.
    """
    generator = np.random.default_rng([step, num_rows])
    rows = []
    for number in range(num_rows):
        lengths = generator.integers(2, 5), generator.integers(2, 10)
        prompt, answer = (generator.integers(0, VOCAB, length).tolist() for length in lengths)
        plain = row(
            SequenceKey(number, 0, step, 0), prompt=prompt, answer=answer, version=step - 1,
            advantage=float(generator.normal()), reward=float(number % 2),
        )  # fmt: skip
        plain = replace(plain, temperature=temperature, region=REGIONS[number % len(REGIONS)])
        if step > 1 and number % 3 == 0:
            versions = plain.versions.copy()
            versions[len(prompt)] = step - 2
            plain = replace(plain, versions=versions, min_version=step - 2)
        with torch.no_grad():
            own = np.concatenate([[0.0], reference_logprobs(model, plain).numpy()])
        moved = own + noise * generator.normal(size=own.shape)
        rows.append(replace(plain, logprobs=np.where(plain.loss_mask, moved, 0).astype(np.float32)))
    return batch(*rows, step=step)


def opened(config: Json = MODEL_CONFIG, checkpointing: bool = False, **settings: Any) -> HfModel:
    """The model of `config` with random weights."""
    return HfModel(config, base_weights(config=config), "cpu", checkpointing, **settings)
