"""A real decoder whose next-token distribution depends only on the newest token, so that answers
can be worked out by hand.

Embeddings are one-hot and every layer adds nothing: after the final norm, token t is √V · e_t, and
column t of the output projection holds the logits that follow t.
"""

from collections.abc import Callable

import numpy as np

from storage.records.types import Float32, Json
from storage.records.weights import HostTensor

VOCAB = 16
CONFIG: Json = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": VOCAB,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "rms_norm_eps": 1e-12,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm": (VOCAB,),
    "post_attention_layernorm": (VOCAB,),
    "self_attn.q_proj": (8, VOCAB),
    "self_attn.k_proj": (4, VOCAB),
    "self_attn.v_proj": (4, VOCAB),
    "self_attn.o_proj": (VOCAB, 8),
    "self_attn.q_norm": (4,),
    "self_attn.k_norm": (4,),
    "mlp.gate_proj": (8, VOCAB),
    "mlp.up_proj": (8, VOCAB),
    "mlp.down_proj": (VOCAB, 8),
}


def host_tensor(array: Float32) -> HostTensor:
    return HostTensor(
        "F32", array.shape, np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    )


def chain(logits: Callable[[int], list[float]]) -> dict[str, HostTensor]:
    """Weights for which token t is followed by tokens with the `VOCAB` logits of `logits(t)`."""
    arrays = {
        f"model.layers.0.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in LAYER.items()
    }
    arrays["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    arrays["model.norm.weight"] = np.ones(VOCAB, np.float32)
    columns = [np.array(logits(token), np.float32) / VOCAB**0.5 for token in range(VOCAB)]
    arrays["lm_head.weight"] = np.stack(columns, axis=1)
    return {name: host_tensor(array) for name, array in arrays.items()}


def counting(stride: int) -> dict[str, HostTensor]:
    """Weights for which token t is followed by t + stride (mod VOCAB) with probability almost 1."""
    return chain(
        lambda token: [60.0 if to == (token + stride) % VOCAB else 0.0 for to in range(VOCAB)]
    )


def iid_weights(probabilities: list[float]) -> dict[str, HostTensor]:
    """Weights that sample every token from `probabilities`; tokens beyond their end are impossible."""
    logits = [float(np.log(p)) for p in probabilities] + [-1000.0] * (VOCAB - len(probabilities))
    return chain(lambda token: logits)
