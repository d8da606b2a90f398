import math

import pytest
import torch
from torch import Tensor

from trainer.engines.torch.logprobs import token_logprobs


def head(hidden: Tensor) -> Tensor:
    """A model whose hidden state is the logits."""
    return hidden * 1.0


def test_logprobs_and_entropy_of_a_known_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
    logprobs, entropies = token_logprobs(logits, head, torch.tensor([0, 2]), torch.ones(2))
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.6)])
    assert entropies.tolist() == pytest.approx([1.5 * math.log(2), 0.9502705])


def test_each_token_has_its_own_temperature() -> None:
    # At temperature ½ probabilities are squared and normalised: ½ and ¼, ¼ become 2/3 and 1/6, 1/6.
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]))
    logprobs, _ = token_logprobs(logits, head, torch.tensor([0, 1]), torch.tensor([0.5, 1.0]))
    assert logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(0.25)])


@pytest.mark.parametrize("logits_max", [1, 7, 20, 10_000])
def test_chunks_change_neither_values_nor_gradients(logits_max: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 4, generator=generator, requires_grad=True)
    hidden = torch.randn(9, 4, generator=generator, requires_grad=True)
    targets, temperatures = torch.arange(9) % 5, torch.linspace(0.5, 1.5, 9)

    def gradients(limit: int) -> tuple[Tensor, ...]:
        logprobs, entropies = token_logprobs(
            hidden, lambda part: part @ weight.T, targets, temperatures, limit
        )
        slopes = torch.autograd.grad((logprobs * torch.arange(9.0)).sum(), (hidden, weight))
        return logprobs, entropies, *slopes

    for chunked, whole in zip(gradients(logits_max), gradients(10_000), strict=True):
        assert torch.allclose(chunked, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("logits_max", "rows"),
    [(1, [1] * 5), (10, [2, 2, 1]), (14, [2, 2, 1]), (15, [3, 2]), (25, [5])],
)
def test_logits_in_memory_are_limited(logits_max: int, rows: list[int]) -> None:
    created: list[int] = []

    def counting_head(hidden: Tensor) -> Tensor:
        created.append(len(hidden))
        return hidden * 1.0

    token_logprobs(
        torch.zeros(5, 5),
        counting_head,
        torch.zeros(5, dtype=torch.int64),
        torch.ones(5),
        logits_max,
    )
    assert created[0] == 1  # the width of the logits
    assert created[1:] == rows


def test_no_tokens_give_no_logprobs_and_a_defined_gradient() -> None:
    hidden = torch.zeros(0, 3, requires_grad=True)
    logprobs, entropies = token_logprobs(
        hidden, head, torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    assert logprobs.tolist() == entropies.tolist() == []
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].shape == (0, 3)


def test_other_shapes_are_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\], \[1\], \[2\]"):
        token_logprobs(torch.zeros(2, 3), head, torch.zeros(1, dtype=torch.int64), torch.ones(2))
