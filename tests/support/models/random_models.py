"""Small transformers models with all parameters random, also norms and biases: the reference for
our own decoder.
"""

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from storage.records.types import Json
from storage.records.weights import HostTensor

SIZES: Json = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
QWEN3: Json = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **SIZES}


def random_model(config: Json, seed: int = 0) -> Any:
    """A transformers model of `config`; the same seed gives the same parameters."""
    torch.manual_seed(seed)
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def host_tensors(model: Any) -> dict[str, HostTensor]:
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {
        name: HostTensor("F32", a.shape, np.ascontiguousarray(a).view(np.uint32))
        for name, a in arrays.items()
    }
