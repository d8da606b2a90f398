"""Memory that a trainer needs, on each device and on its host: an estimate before it starts.

The largest moment counts: on a device the backward pass of the last layer of a minibatch, on a host
the read of a checkpoint or its copy. Not counted: the CUDA context and the libraries (about 1 GB a
process), fragmentation, temporary tensors of one operation.

Importing this module does not import torch.
"""

from storage.formats.model_sizes import ModelSizes
from trainer.adapters import Lora
from trainer.config import TrainConfig

FLOAT = 4
"""Bytes of a master weight, a gradient, a moment."""
LOGITS_MAX = 2**25
"""Logits of a chunk (`trainer/engines/step/logprobs.py`), which has three such tensors at once."""
BUCKET_ELEMENTS_MAX = 500_000_000
"""Gradients that DeepSpeed collects at most before it sends them; its default."""
LIVE_ELEMENTS_MAX = 1_000_000_000
"""Weights that DeepSpeed's stage 3 keeps gathered at most (its stage3_max_live_parameters)."""


def train_bytes(config: TrainConfig, model: ModelSizes) -> dict[str, int]:
    """Return the bytes of each part on one of `config.num_ranks` devices.

    Weights, gradients and two moments in float32 are divided over the ranks, whole where the stage
    of ZeRO keeps them whole. With an adapter, only its weights have gradients and moments. Parts
    that are 0 are left out.
    """
    head = FLOAT * model.vocab * model.hidden
    parts = _weights(config, model) | {
        "activations": _activations(config, model),
        "logits": 3 * FLOAT * min(LOGITS_MAX, config.micro_batch_tokens * model.vocab),
        "gradient of the head": 0 if isinstance(config.adapter, Lora) else head,
        "reference": _reference(config, model),
    }
    if config.precision == "bf16":
        # Autocast keeps the rounded matrices of a pass; the embedding is looked up as it is.
        looked_up = model.embeddings - model.vocab * model.hidden
        parts["weights in bf16"] = 2 * (model.parameters - looked_up)
    if config.device != "cpu" and config.num_ranks == 1 and config.engine == "torch":
        parts["published bits"] = _published_dtype_bytes(config) * _num_published(config, model)
    return {part: num_bytes for part, num_bytes in parts.items() if num_bytes}


def _weights(config: TrainConfig, model: ModelSizes) -> dict[str, int]:
    """Return the parts of weights, gradients and optimizer, and of those gathered from ranks."""
    whole, part = FLOAT * model.parameters, FLOAT * model.parameters // config.num_ranks
    if config.engine != "deepspeed":
        trained = FLOAT * _num_trained(config, model)
        adapter = trained if isinstance(config.adapter, Lora) else 0
        return {
            "weights": (whole + adapter) // config.num_ranks,
            "gradients": trained // config.num_ranks,
            "moments": 2 * trained // config.num_ranks,
            "gathered": _gathered(model) if config.num_ranks > 1 else 0,
        }
    stage, offloads = config.deepspeed.stage, config.deepspeed.offload_optimizer
    return {
        "weights": part if stage == 3 else whole,
        # Stages 1 and 2 update a copy of their part; stage 3 updates the part itself.
        "copy for the optimizer": part if stage < 3 and not offloads else 0,
        "gradients": whole if stage == 1 else 0 if offloads else part,
        "moments": 0 if offloads else 2 * part,
        "gathered": FLOAT * min(LIVE_ELEMENTS_MAX, model.parameters) if stage == 3 else 0,
        "gradients to send": FLOAT * bucket_elements(model.parameters),
    }


def bucket_elements(parameters: int) -> int:
    """Return the size of DeepSpeed's buffer of gradients (its reduce_bucket_size) for a model."""
    return min(BUCKET_ELEMENTS_MAX, parameters)


def _num_trained(config: TrainConfig, model: ModelSizes) -> int:
    """Return the number of elements that have gradients and moments."""
    adapter = config.adapter
    return adapter.parameters(model) if isinstance(adapter, Lora) else model.parameters


def _num_published(config: TrainConfig, model: ModelSizes) -> int:
    """Return the number of elements of a version that can differ from the version before."""
    apart = isinstance(config.adapter, Lora) and config.adapter.publish == "adapter"
    return _num_trained(config, model) if apart else model.parameters


def _reference(config: TrainConfig, model: ModelSizes) -> int:
    """Return the part of the frozen reference, which is shared out whatever the stage of ZeRO.

    It has the precision of the products; with bf16 the embeddings stay float32.
    """
    if config.reference is None:
        return 0
    bits = 2 if config.precision == "bf16" else 4
    embeddings = (4 - bits) * model.vocab * model.hidden
    return (bits * model.parameters + embeddings) // config.num_ranks


def _gathered(model: ModelSizes) -> int:
    """Return what FSDP2 gathers in float32: embedding and head for the whole pass, with their
    gradients; the layer in progress and the next one; the gradient of a layer.
    """
    layer = (model.parameters - model.embeddings) // max(1, model.layers)
    return FLOAT * (2 * model.embeddings + 3 * layer)


def _activations(config: TrainConfig, model: ModelSizes) -> int:
    """Return what the backward pass needs of `micro_batch_tokens`.

    With checkpointing this is one hidden state a layer, in float32 with either precision, and one
    layer in full. The numbers of elements of a layer are those that torch saves for Qwen3 with
    sdpa.
    """
    if config.precision == "bf16":
        layer = 26 * model.hidden + 10 * model.query_elements + 5 * model.kv_elements
        layer += 8 * model.intermediate
    else:
        layer = 24 * model.hidden + 16 * model.query_elements + 8 * model.kv_elements
        layer += 16 * model.intermediate
    kept = model.layers * layer
    if config.activation_checkpointing:
        kept = FLOAT * model.hidden * model.layers + layer
    return config.micro_batch_tokens * kept


def train_host_bytes(config: TrainConfig, model: ModelSizes) -> dict[str, int]:
    """Return the bytes of each part in the memory of the trainer's machine, over all ranks.

    Devices other than `cpu` are not in it. While a checkpoint is written: two versions, the newest
    published one and the next, and the copy of masters and moments. While a checkpoint is read: its
    tensors, their copy for the ranks, and the moments of each rank, which every rank reads whole.
    The larger of the two is returned. With an adapter, a checkpoint has the base as it was given.
    """
    trained, version = FLOAT * _num_trained(config, model), published_bytes(config, model)
    saved = 3 * trained + (version if isinstance(config.adapter, Lora) else 0)
    writing = {
        "two versions": 2 * version,
        "publishing": min(config.publish_memory_mb * 2**20, version),
        "checkpoint": saved,
    }
    if config.device == "cpu":
        return writing
    reading = {
        "checkpoint": saved,
        "copy for the ranks": saved if config.num_ranks > 1 or config.engine == "deepspeed" else 0,
        "moments of each rank": 2 * trained * config.ranks,
    }
    if config.engine == "deepspeed" and config.deepspeed.offload_optimizer:
        # A float32 copy of the weights, their gradients, two moments, a buffer for the weights.
        for parts in (writing, reading):
            parts["optimizer"] = 5 * FLOAT * model.parameters
    larger = max(writing, reading, key=lambda parts: sum(parts.values()))
    return {part: num_bytes for part, num_bytes in larger.items() if num_bytes}


def published_bytes(config: TrainConfig, model: ModelSizes) -> int:
    """Return the bytes of a published version, without an adapter of its own."""
    return _published_dtype_bytes(config) * model.parameters


def _published_dtype_bytes(config: TrainConfig) -> int:
    return 2 if config.publish_dtype == "BF16" else 4
