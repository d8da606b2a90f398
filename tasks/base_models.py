"""Base models: what a policy's version 0 is made of. A tiny one is built here once and kept by the digest of its recipe; any
other is read from a folder or fetched from the hub. Knows nothing of runs and policies.

    tiny ──▶ models/{digest of the build recipe}/   (in the store, shared by all runs)
    path ──▶ a folder of the transformers library   ◀── hub (downloaded into the hub's own cache)
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import models
from storage.errors import ConfigError
from storage.objects import ObjectStore
from storage.records import HostTensor
from storage.tensors import from_safetensors
from tasks.config import ModelConfig, TinyBase
from tasks.tiny_demonstrations import HABITS, SKILL, demonstrations
from tasks.tiny_tokenizer import END, PAD, token_id, tokenizer, tokenizer_files

BUILD_FORMAT = 1
"""Raised when the same `TinyBase` would give another model, so that stores do not serve the old one."""
MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""What travels with a model's weights, where it is there."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is finished."""


@dataclass(frozen=True)
class BaseModel:
    """A model ready to be published as version 0."""

    tensors: Mapping[str, HostTensor]
    files: Mapping[str, bytes]
    """`config.json`, the tokenizer's files, …"""


def ensure_base_model(store: ObjectStore, model: ModelConfig, progress: Progress) -> BaseModel:
    """The base model of a policy, built or fetched when it is not there yet.

    Raises:
        ConfigError: the folder or the hub's model cannot be used; says why, and what to do.
    """
    if model.tiny is not None:
        return _tiny(store, model.tiny, progress)
    if model.path is not None:
        return read_folder(Path(model.path), progress)
    assert model.hub is not None, "ModelConfig has exactly one source"
    return read_folder(_download(model.hub, progress), progress)


def build_digest(tiny: TinyBase) -> str:
    """Digest of everything the built model depends on."""
    recipe = {"format": BUILD_FORMAT, **tiny.model_dump(mode="json")}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def _tiny(store: ObjectStore, tiny: TinyBase, progress: Progress) -> BaseModel:
    digest = build_digest(tiny)
    if not models.has_model(store, digest):
        built = build_tiny(tiny, progress)
        models.save_model(store, digest, built.tensors, built.files, {})
    # Read back even when it was built here: a rival builder may have been first, and its model stands.
    return BaseModel(*models.load_model(store, digest))


def build_tiny(tiny: TinyBase, progress: Progress) -> BaseModel:
    """Warm up a fresh tiny model on demonstrations: first the skill, then the habits that hide it. One thread, seeded."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.bits import to_host
    from trainer.warmup import Phase, warm_up

    torch.set_num_threads(1)
    torch.manual_seed(tiny.seed)
    config = Qwen3Config(**_architecture(tiny))
    model = Qwen3ForCausalLM(config)
    total = max(1, tiny.skill_iterations + tiny.habit_iterations)
    phases = [
        Phase(
            "skill", demonstrations(SKILL, tiny.seed), tiny.skill_iterations, lr=3e-3, muon_lr=0.02,
            warmup_iterations=20, decay_share=0.3, final_factor=0.05,
        ),
        Phase("habits", demonstrations(HABITS, tiny.seed + 1000), tiny.habit_iterations, lr=1e-3, decay_share=1.0, final_factor=0.1),
    ]  # fmt: skip
    before = {"skill": 0, "habits": tiny.skill_iterations}
    sizes = {"skill": tiny.skill_iterations, "habits": tiny.habit_iterations}

    def report(phase: str, share: float) -> None:
        progress(f"building the base model: {phase}", (before[phase] + share * sizes[phase]) / total)

    warm_up(model, phases, tiny.batch_size, report)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name: to_host(tensor, "BF16") for name, tensor in state.items()}
    return BaseModel(tensors, {"config.json": config.to_json_string(use_diff=False).encode(), **tokenizer_files()})


def _architecture(tiny: TinyBase) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer().get_vocab_size(),
        "hidden_size": tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.intermediate,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
    }


def read_folder(folder: Path, progress: Progress) -> BaseModel:
    """A model folder as the transformers library writes it: safetensors, in one file or in several with an index."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json; give the folder that save_pretrained wrote")
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ConfigError(
            f"{folder} lacks {', '.join(missing) or 'weights in *.safetensors files'}; save the model again with safetensors"
        )
    tensors: dict[str, HostTensor] = {}
    for at, shard in enumerate(shards):
        tensors.update(from_safetensors(shard.read_bytes()))
        progress(f"reading {folder.name}", (at + 1) / len(shards))
    files = {name: (folder / name).read_bytes() for name in MODEL_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        raise ConfigError(f"{folder} has no tokenizer.json; save the model's tokenizer into the same folder")
    return BaseModel(tensors, files)


def _download(name: str, progress: Progress) -> Path:
    """A folder of the hub's model in the hub's cache; ConfigError when the hub cannot be reached or does not know it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"downloading {name}", 0.0)
    try:
        found = snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"])
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no model {name!r}, or it needs a token (set HF_TOKEN)") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model {name!r} cannot be fetched from the hub and is not in its cache: {error}; "
            "check the network, or set model.path to a local folder"
        ) from error
    return Path(found)
