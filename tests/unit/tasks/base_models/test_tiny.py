"""The tiny base model's folder: transformers loads and runs it, and a build is deterministic."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.formats.safetensors import to_safetensors, weights_digest
from tasks.base_models.config import TinyBase
from tasks.base_models.tiny import build, model_config, model_files, phases

SMALL = TinyBase(
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    intermediate=16,
    skill_iterations=2,
    habit_iterations=1,
    batch_size=4,
)


def silent(stage: str, share: float) -> None:
    """A progress callback that does nothing."""


def test_the_default_is_well_under_a_million_parameters():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**model_config(TinyBase())))
    # 359 tokens · 64, and twice: q 64·64, k and v 32·64, o 64·64, three of 64·192, two norms of 64,
    # two of 16; one norm of 64.
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 192 + 2 * 64 + 2 * 16
    assert model.num_parameters() == 359 * 64 + 2 * layer + 64 == 121_664


def test_two_builds_have_the_same_bits_and_keep_the_callers_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, losses = build(SMALL, silent)
    assert torch.rand(1) == expected
    second, _ = build(SMALL, silent)
    assert weights_digest(first) == weights_digest(second)
    assert weights_digest(build(SMALL.model_copy(update={"seed": 1}), silent)[0]) != weights_digest(
        first
    )
    assert set(losses) == {"teaching the skill", "adding bad habits"}


def test_progress_is_the_finished_share_of_all_phases():
    reported: list[tuple[str, float]] = []
    build(SMALL, lambda stage, share: reported.append((stage, share)))
    assert [stage for stage, _ in reported] == [
        "teaching the skill",
        "teaching the skill",
        "adding bad habits",
    ]
    assert [share for _, share in reported] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_the_learning_rate_falls_at_the_end_of_the_skill_and_throughout_the_habit():
    skill, habits = phases(TinyBase())
    assert [round(skill.factor(i), 3) for i in (0, 19, 391, 476, 559)] == [
        0.05,
        1.0,
        1.0,
        0.525,
        0.056,
    ]
    assert [round(habits.factor(i), 3) for i in (0, 30, 59)] == [1.0, 0.55, 0.115]


def test_transformers_loads_the_folder_and_generates_from_it(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors, _ = build(SMALL, silent)
    for name, body in model_files(SMALL).items():
        (tmp_path / name).write_bytes(body)
    (tmp_path / "model.safetensors").write_bytes(to_safetensors(tensors))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    held = (
        model.model.embed_tokens.weight.detach()
        .to(torch.bfloat16)
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
    )
    assert np.array_equal(held, tensors["model.embed_tokens.weight"].bits)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7+8=?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, max_new_tokens=3)
    assert answer.shape[1] <= asked["input_ids"].shape[1] + 3
    assert (
        model.generation_config.eos_token_id
        == tokenizer.eos_token_id
        == json.loads((tmp_path / "config.json").read_text())["eos_token_id"]
    )


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_files_are_json_and_the_same_each_time(name: str):
    assert json.loads(model_files(SMALL)[name])
    assert model_files(SMALL)[name] == model_files(SMALL)[name]
