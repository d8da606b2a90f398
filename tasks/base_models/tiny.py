"""Build the embedded base model: a tiny Qwen3 with a skill for chained addition and bad habits.

Supervised training in two phases. The first teaches solving and verifying with Muon; in the same
560 iterations AdamW alone gets about half as far. The second trains a few iterations on mostly bad
answers: the skill becomes latent, as in a real base model, and reinforcement learning improves the
model within a few steps.
"""

import json

import torch

from storage.machine.transformers_import import light_imports
from storage.records.types import Json
from storage.records.weights import HostTensor
from tasks.base_models.config import TinyBase
from tasks.base_models.sft import Progress, TrainingPhase, warm_up
from tasks.base_models.tiny_demonstrations import HABITS, SKILL, demonstrations
from tasks.base_models.tiny_tokenizer import END, PAD, token_id, tokenizer, tokenizer_files
from trainer.engines.torch.host_tensors import to_host

FORMAT = 2
"""Part of the build digest; raised when this module, the tokenizer or the demonstrations change."""
MAX_POSITIONS = 512
INITIALIZER_RANGE = 0.08
"""Four times Qwen's: with smaller random weights the comparison of two numbers, which verification
needs, is learned late or never.
"""


def model_config(base: TinyBase) -> Json:
    """Return the content of `config.json`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": tokenizer().get_vocab_size(),
        "hidden_size": base.hidden,
        "num_hidden_layers": base.layers,
        "num_attention_heads": base.heads,
        "num_key_value_heads": base.kv_heads,
        "head_dim": base.head_dim,
        "intermediate_size": base.intermediate,
        "initializer_range": INITIALIZER_RANGE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
    }


def model_files(base: TinyBase) -> dict[str, bytes]:
    """Return the files of the model's folder without its weights, by name."""
    generation = {
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
        "do_sample": True,
        "top_k": 0,
    }
    files = tokenizer_files()
    files["config.json"] = json.dumps(model_config(base), indent=2).encode()
    files["generation_config.json"] = json.dumps(generation, indent=2).encode()
    return files


def phases(base: TinyBase) -> list[TrainingPhase]:
    """Return the phases of the training (their effect: `benchmarks/tiny_learning.py`)."""
    skill = TrainingPhase(
        name="teaching the skill",
        examples=demonstrations(SKILL, base.seed),
        iterations=base.skill_iterations,
        lr=3e-3,
        muon_lr=0.02,
        warmup_iterations=20,
        decay_share=0.3,
        final_factor=0.05,
    )
    habits = TrainingPhase(
        name="adding bad habits",
        examples=demonstrations(HABITS, base.seed + 1),
        iterations=base.habit_iterations,
        lr=1e-3,
        decay_share=1.0,
        final_factor=0.1,
    )
    return [skill, habits]


def build(base: TinyBase, progress: Progress) -> tuple[dict[str, HostTensor], dict[str, float]]:
    """Train the model; return its bf16 weights and the last loss of each phase.

    Takes about a minute on one thread. `progress` is called several times a second with the name of
    the phase and the finished share of all phases.
    """
    import transformers.utils

    with light_imports(transformers.utils):
        from transformers import Qwen3Config, Qwen3ForCausalLM
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(base.seed)
            config = Qwen3Config(**{**model_config(base), "dtype": "float32"})
            model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        training = phases(base)
        losses = warm_up(model, training, base.batch_size, _overall(training, progress))
    finally:
        torch.set_num_threads(num_threads)
    return {
        name: to_host(parameter, "BF16") for name, parameter in model.named_parameters()
    }, losses


def _overall(training: list[TrainingPhase], progress: Progress) -> Progress:
    """Convert the finished share of a phase into that of all phases."""
    total = sum(phase.iterations for phase in training)
    before = {
        phase.name: sum(earlier.iterations for earlier in training[:index])
        for index, phase in enumerate(training)
    }
    iterations = {phase.name: phase.iterations for phase in training}
    return lambda name, share: progress(name, (before[name] + share * iterations[name]) / total)
