"""Compared with softmax, gather and autograd over all logits, and with finite differences."""

import math
import re

import pytest
import torch
from torch import Tensor

from trainer.engines.step import logprobs as module
from trainer.engines.step.logprobs import token_logprobs


def linear(weight: Tensor, bias: Tensor | None = None) -> torch.nn.Linear:
    """A head with these weights."""
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    head.weight = torch.nn.Parameter(weight)
    if bias is not None:
        head.bias = torch.nn.Parameter(bias)
    return head


def identity(size: int) -> torch.nn.Linear:
    """The head of a model whose hidden state is the logits."""
    return linear(torch.eye(size))


def naive(
    hidden: Tensor, head: torch.nn.Linear, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden) / temperatures[:, None], dim=-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def case(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor]:
    """Hidden states, head, targets and temperatures; each token has its own temperature."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=dtype)
    offsets = torch.randn(vocabulary, generator=draw, dtype=dtype) if bias else None
    targets = torch.randint(vocabulary, (tokens,), generator=draw)
    return hidden, linear(weight, offsets), targets, torch.linspace(0.5, 1.5, tokens, dtype=dtype)


def gradients(logprobs: Tensor, hidden: Tensor, head: torch.nn.Linear) -> list[Tensor]:
    """Slopes of a sum with other weights for each token."""
    weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    inputs = [hidden, *head.parameters()]
    return list(torch.autograd.grad((logprobs * weights).sum(), inputs))


def test_logprobs_and_entropy_of_a_known_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
    logprobs, entropies = token_logprobs(logits, identity(3), torch.tensor([0, 2]), torch.ones(2))
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.6)])
    assert entropies.tolist() == pytest.approx([1.5 * math.log(2), 0.9502705])


def test_each_token_has_its_own_temperature() -> None:
    # At temperature ½ probabilities are squared and normalised: ½ and ¼, ¼ become 2/3 and 1/6, 1/6.
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]))
    logprobs, _ = token_logprobs(
        logits, identity(3), torch.tensor([0, 1]), torch.tensor([0.5, 1.0])
    )
    assert logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(0.25)])


@pytest.mark.parametrize("logits_max", [1, 12, 1000])  # 1, 2 and all 5 tokens a chunk
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_finite_differences(logits_max: int, bias: bool) -> None:
    hidden, head, targets, temperatures = case(5, 3, 6, torch.float64, bias)

    def logprobs(hidden: Tensor, *parameters: Tensor) -> Tensor:
        return token_logprobs(
            hidden, linear_of(*parameters), targets, temperatures, logits_max=logits_max
        )[0]

    def linear_of(*parameters: Tensor) -> torch.nn.Linear:
        made = torch.nn.Linear(3, 6, bias=bias)
        for name, parameter in zip(("weight", "bias"), parameters, strict=False):
            delattr(made, name)
            setattr(made, name, parameter)
        return made

    assert torch.autograd.gradcheck(logprobs, (hidden, *head.parameters()))


@pytest.mark.parametrize("logits_max", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_agree_with_all_logits_at_once(logits_max: int, bias: bool) -> None:
    hidden, head, targets, temperatures = case(40, 16, 3000, bias=bias)
    expected, expected_entropy = naive(hidden, head, targets, temperatures)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperatures, None, logits_max)
    exact, exact_entropy = naive(
        hidden.double(), linear_in_double(head), targets, temperatures.double()
    )
    assert relative(logprobs, exact) <= 1e-6
    assert relative(logprobs, expected) <= 1e-6
    assert relative(entropy, exact_entropy) <= 1e-6
    assert relative(entropy, expected_entropy) <= 1e-6
    assert not entropy.requires_grad
    for ours, theirs in zip(
        gradients(logprobs, hidden, head), gradients(expected, hidden, head), strict=True
    ):
        assert relative(ours, theirs) <= 3e-6  # other orders of the sums, which the CPU decides


def linear_in_double(head: torch.nn.Linear) -> torch.nn.Linear:
    bias = None if head.bias is None else head.bias.detach().double()
    return linear(head.weight.detach().double(), bias)


def relative(item: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value of the second."""
    item, other = item.detach().double(), other.detach().double()
    return float((item - other).abs().max() / other.abs().max())


def test_bf16_operands_are_rounded_and_sums_are_float32() -> None:
    hidden, head, targets, temperatures = case(40, 16, 3000)
    rounded = hidden.detach().bfloat16().float().requires_grad_()
    rounded_head = linear(head.weight.detach().bfloat16().float(), head.bias.detach())
    expected = naive(rounded, rounded_head, targets, temperatures)
    values = token_logprobs(hidden, head, targets, temperatures, torch.bfloat16, 20_000)
    for ours, theirs in zip(values, expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) <= 1e-6
    for ours, theirs in zip(
        gradients(values[0], hidden, head),
        gradients(expected[0], rounded, rounded_head),
        strict=True,
    ):
        assert ours.dtype == torch.float32
        # Only the slopes of the logits are rounded: the sums are not.
        assert relative(ours, theirs) <= 2**-8


def test_the_gradient_of_a_tied_head_is_added_to_that_of_the_embedding() -> None:
    _, head, targets, temperatures = case(9, 4, 7, bias=False)
    tokens = torch.arange(9) % 7

    def gradient(compute: object) -> Tensor:
        hidden = torch.nn.functional.embedding(tokens, head.weight)
        logprobs, _ = compute(hidden, head, targets, temperatures)  # type: ignore[operator]
        return torch.autograd.grad(logprobs.sum(), head.weight)[0]

    assert relative(gradient(token_logprobs), gradient(naive)) <= 1e-6


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, head, targets, temperatures = case(9, 4, 7)
    head.requires_grad_(False)
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures)
    expected, _ = naive(hidden, head, targets, temperatures)
    logprobs.sum().backward()
    ours, hidden.grad = hidden.grad, None
    expected.sum().backward()
    assert ours is not None
    assert hidden.grad is not None
    assert relative(ours, hidden.grad) <= 1e-6
    assert head.weight.grad is None


def test_the_backward_pass_may_run_twice() -> None:
    hidden, head, targets, temperatures = case(9, 4, 7)
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures)
    first = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(logprobs.sum(), hidden)[0])


@pytest.mark.parametrize(
    ("logits_max", "forward", "backward"),
    [
        (1, [1] * 5, [1] * 5),
        (10, [2, 2, 1], [2, 2, 1]),
        (14, [2, 2, 1], [2, 2, 1]),
        (15, [3, 2], [3, 2]),
        (24, [4, 1], [4, 1]),
        (25, [5], []),
    ],
)
def test_logits_in_memory_are_limited_and_those_of_one_chunk_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, logits_max: int, forward: list[int], backward: list[int]
) -> None:
    sizes: list[int] = []
    original = module._logits

    def counted(hidden: Tensor, *rest: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return original(hidden, *rest)

    monkeypatch.setattr(module, "_logits", counted)
    hidden, head, targets, temperatures = case(5, 3, 5)
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures, None, logits_max)
    assert sizes == forward
    sizes.clear()
    logprobs.sum().backward()
    assert sizes == backward


def test_no_tokens_give_no_logprobs_and_a_defined_gradient() -> None:
    hidden, head, targets, temperatures = case(0, 3, 5)
    logprobs, entropies = token_logprobs(hidden, head, targets, temperatures)
    assert logprobs.tolist() == entropies.tolist() == []
    grad_hidden, grad_weight, grad_bias = gradients(logprobs, hidden, head)
    assert grad_hidden.shape == (0, 3)
    assert not grad_weight.any()
    assert not grad_bias.any()


@pytest.mark.parametrize(
    "shapes", [[(2, 3), (1,), (2,)], [(2, 3), (2,), (1,)], [(1, 2, 3), (1,), (1,)]]
)
def test_other_shapes_are_refused_and_named(shapes: list[tuple[int, ...]]) -> None:
    hidden, targets, temperatures = shapes
    found = re.escape(f"found {[list(shape) for shape in shapes]}")
    with pytest.raises(ValueError, match=f"targets .N. and temperatures .N., {found}$"):
        token_logprobs(
            torch.zeros(hidden),
            identity(3),
            torch.zeros(targets, dtype=torch.int64),
            torch.ones(temperatures),
        )
