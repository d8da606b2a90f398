"""Supervised warm-up: schedule and loss by hand, independence of padding, determinism, and
learning.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from tasks.base_models.muon import Muon
from tasks.base_models.sft import Example, TrainingPhase, warm_up, weighted_loss_sum


def tiny_model(seed: int = 0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=32)
    )


def example(tokens: list[int], weights: list[float]) -> Example:
    return np.array(tokens, np.int32), np.array(weights, np.float32)


def no_examples() -> Iterator[Example]:
    return iter(())


def test_learning_rates_rise_stay_and_fall():
    phase = TrainingPhase(
        name="p",
        examples=no_examples(),
        iterations=100,
        lr=1.0,
        warmup_iterations=20,
        decay_share=0.3,
        final_factor=0.1,
    )
    assert [phase.factor(i) for i in (0, 9, 19, 50, 70)] == [0.05, 0.5, 1.0, 1.0, 1.0]
    assert phase.factor(85) == pytest.approx(0.55)  # half of the way from 1 to 0.1
    assert phase.factor(99) == pytest.approx(1 - 29 / 30 * 0.9)


def test_learning_rates_are_constant_by_default():
    phase = TrainingPhase(name="p", examples=no_examples(), iterations=10, lr=1.0)
    assert [phase.factor(i) for i in range(10)] == [1.0] * 10


def test_the_loss_is_the_weighted_sum_over_the_predicted_tokens():
    model = tiny_model()
    tokens = torch.tensor([[1, 2, 3, 4]])
    weights = torch.tensor([[0.0, 0.0, 1.0, 4.0]])
    logprobs = torch.log_softmax(model(tokens).logits, -1)
    expected = -(1 * logprobs[0, 1, 3] + 4 * logprobs[0, 2, 4])
    torch.testing.assert_close(weighted_loss_sum(model, tokens, weights), expected)


def test_padding_does_not_change_the_loss():
    model = tiny_model()
    tokens, weights = torch.tensor([[1, 2, 3]]), torch.tensor([[0.0, 1.0, 1.0]])
    padded = torch.tensor([[1, 2, 3, 0, 0]]), torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(
        weighted_loss_sum(model, *padded), weighted_loss_sum(model, tokens, weights)
    )


def test_a_batch_of_many_lengths_gives_the_gradient_of_its_weighted_mean():
    """Splitting a batch into micro-batches by length must not change the gradient: 40 examples make
    three of them.
    """
    generator = np.random.default_rng(0)
    examples = [
        example(
            generator.integers(0, 11, length).tolist(),
            [0.0, *generator.uniform(0.5, 4, length - 1)],
        )
        for length in generator.integers(2, 9, 40)
    ]
    model = tiny_model()
    before = model.lm_head.weight.detach().clone()
    phase = TrainingPhase(
        name="p", examples=iter(examples), iterations=1, lr=1.0, betas=(0.0, 0.0), weight_decay=0.0
    )
    with torch.enable_grad():
        losses = [
            weighted_loss_sum(model, torch.tensor(t[None].astype(np.int64)), torch.tensor(w[None]))
            for t, w in examples
        ]
        mean = torch.stack(losses).sum() / sum(float(w[1:].sum()) for _, w in examples)
        mean.backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    reported = warm_up(model, [phase], 40, lambda *_: None)
    assert reported["p"] == pytest.approx(mean.item(), rel=1e-5)
    moved = model.lm_head.weight.detach() - before
    large = expected.abs() > 1e-4  # with betas of 0 AdamW moves against the gradient's sign
    assert torch.equal(moved[large].sign(), -expected[large].sign())


@pytest.mark.parametrize("muon_lr", [None, 0.05])
def test_iterations_equal_those_of_plain_optimizers_with_clipped_gradients(
    muon_lr: float | None,
) -> None:
    """Against one example at a time, and rates written out: 0.5, 1, 1, 0.55 of the full ones.

    In float64, because AdamW moves weights of tiny gradients as far as others: rounding would show.
    """
    generator = np.random.default_rng(1)
    examples = [
        example(
            generator.integers(0, 11, 6).tolist(), generator.uniform(0.5, 4, 6).tolist()
        )  # the first weight is never used
        for _ in range(4 * 3)
    ]
    model, plain = tiny_model().double(), tiny_model().double()
    for item in (model, plain):
        with torch.no_grad():
            for parameter in item.parameters():
                parameter.mul_(3.0)
    phase = TrainingPhase(
        name="p", examples=iter(examples), iterations=4, lr=1e-2, muon_lr=muon_lr, warmup_iterations=2, decay_share=0.5, final_factor=0.1,
        betas=(0.5, 0.8), momentum=0.7, weight_decay=0.3,
    )  # fmt: skip
    reported = warm_up(model, [phase], 3, lambda *_: None)

    named = dict(plain.named_parameters())
    matrices = [
        p for name, p in named.items() if muon_lr is not None and ".layers." in name and p.ndim == 2
    ]
    rest = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=0.0, betas=(0.5, 0.8), weight_decay=0.3)
    ]
    if muon_lr is not None:
        assert len(matrices) == 7
        optimizers.append(Muon(matrices, lr=0.0, momentum=0.7, weight_decay=0.3))
    for iteration, factor in enumerate((0.5, 1.0, 1.0, 0.55)):
        batch = examples[3 * iteration : 3 * iteration + 3]
        total = torch.zeros((), dtype=torch.float64)
        for tokens, weights in batch:
            logprobs = torch.log_softmax(
                plain(torch.tensor(tokens[None].astype(np.int64))).logits[0], -1
            )
            total = total - sum(
                float(weights[t]) * logprobs[t - 1, int(tokens[t])] for t in range(1, 6)
            )
        mean = total / sum(float(w[1:].sum()) for _, w in batch)
        gradients = torch.autograd.grad(mean, list(plain.parameters()))
        norm = float(torch.cat([each.flatten() for each in gradients]).norm())
        assert norm > 1.5
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.grad = gradient / norm
        for optimizer, rate in zip(optimizers, (1e-2, muon_lr), strict=False):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
    assert reported["p"] == pytest.approx(mean.item(), rel=1e-5)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def copying() -> Iterator[Example]:
    """The answer is the prompt's own token."""
    return cycle([example([9, token, 10, token], [0, 0, 0, 1]) for token in range(9)])


def phases() -> list[TrainingPhase]:
    return [
        TrainingPhase(
            name="muon",
            examples=copying(),
            iterations=40,
            lr=1e-2,
            muon_lr=0.02,
            warmup_iterations=5,
            decay_share=0.3,
            final_factor=0.05,
        ),
        TrainingPhase(
            name="adamw",
            examples=copying(),
            iterations=5,
            lr=1e-3,
            decay_share=1.0,
            final_factor=0.1,
        ),
    ]


def test_a_model_learns_to_copy_and_reports_progress():
    model, reported = tiny_model(), []
    last_loss = warm_up(model, phases(), 9, lambda name, share: reported.append((name, share)))
    assert last_loss["adamw"] < 0.1 < np.log(11)
    assert reported[:2] == [("muon", 1 / 40), ("muon", 2 / 40)]
    assert reported[-1] == ("adamw", 1.0)
    assert not model.training


def test_the_same_seed_gives_the_same_bits():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, second = tiny_model(), tiny_model()
        for model in (first, second):
            warm_up(model, phases(), 9, lambda *_: None)
    finally:
        torch.set_num_threads(threads)
    for item, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(item, other)
