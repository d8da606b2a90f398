"""Demonstrations: their exact words, their loss weights, and their errors by habit."""

from itertools import islice
from random import Random

import numpy as np

from data_ops.prompts.chained_addition import steps
from tasks.base_models.tiny_demonstrations import (
    HABITS,
    SKILL,
    Habits,
    demonstrations,
    encode,
    review,
    solution,
    spoiled,
    verdict,
)
from tasks.base_models.tiny_tokenizer import token_id, tokenizer

CHAIN = [(7, "+", 8, 15), (15, "-", 3, 12)]
WRONG_THEN_CARRIED = [(7, "+", 8, 16), (16, "-", 3, 13)]
WRONG_AT_LAST = [(7, "+", 8, 15), (15, "-", 3, 11)]


def test_a_solution_has_all_steps_and_boxes_the_last_value():
    assert solution(CHAIN) == "7+8=15\n15-3=12\n\\boxed{12}"


def test_a_review_restates_each_step_and_stops_at_the_first_wrong_one():
    assert review(CHAIN) == "7+8=15:15y\n15-3=12:12y\n<verify>approve</verify>"
    assert review(WRONG_AT_LAST) == "7+8=15:15y\n15-3=12:11n\n<verify>reject</verify>"
    assert review(WRONG_THEN_CARRIED) == "7+8=15:16n\n<verify>reject</verify>"


def test_a_bare_box_is_rejected():
    assert review(None) == "<verify>reject</verify>"


def test_an_error_is_propagated():
    for seed in range(50):
        chain = spoiled(steps("7+8-3+9=?"), 1.0, Random(seed))
        assert [left for left, *_ in chain[1:]] == [value for *_, value in chain[:-1]]
        errors = [
            value - (left + right if op == "+" else left - right)
            for left, op, right, value in chain
        ]
        assert all(error in (-10, -2, -1, 1, 2, 10) for error in errors)
    assert spoiled(CHAIN, 0.0, Random(0)) == CHAIN


def test_only_answer_tokens_have_weight_and_verdict_tokens_weigh_four():
    emphasis = np.ones(tokenizer().get_vocab_size(), np.float32)
    emphasis[[token_id("y"), token_id("reject")]] = 4
    example = encode("1y", "y<verify>reject</verify>", emphasis)
    assert tokenizer().decode(example.tokens.tolist(), skip_special_tokens=False) == (
        "<|user|>1y<|end|><|assistant|>y<verify>reject</verify><|end|>"
    )
    #                                   user 1  y  end assistant | y  <verify> reject </verify> end
    assert example.weights.tolist() == [0, 0, 0, 0, 0, 4, 1, 4, 1, 1]


def test_demonstrations_depend_only_on_the_seed():
    first, again, other = (
        [d.tokens.tolist() for d in islice(demonstrations(HABITS, seed), 50)] for seed in (3, 3, 4)
    )
    assert first == again != other


def test_demonstrations_of_the_skill_have_no_error():
    for prompt, answer in exchanges(SKILL, 600):
        question, *_ = prompt.split("\n")
        good = {solution(steps(question)), verdict(False)}
        assert answer in good or answer.endswith(
            ("y\n<verify>approve</verify>", "n\n<verify>reject</verify>")
        )


def test_a_retry_follows_a_rejection_and_is_right():
    retries = [(prompt, answer) for prompt, answer in exchanges(SKILL, 600) if "<verify>" in prompt]
    assert retries
    for prompt, answer in retries:
        question, *_, last = prompt.split("\n")
        assert last == verdict(False)
        assert answer == solution(steps(question))


def test_the_kinds_have_their_shares():
    shown = list(exchanges(SKILL, 2000))
    solver = sum("\n" not in prompt and "verify" not in prompt for prompt, _ in shown)
    verifier = sum("<verify>" in answer for _, answer in shown)
    assert abs(solver / 2000 - 0.40) < 0.04
    assert abs(verifier / 2000 - 0.45) < 0.04


def test_habits_have_their_probabilities():
    habits = Habits(bare_box=0.6, bare_verdict=0.5, approves=0.8)
    shown = list(exchanges(habits, 4000))
    first = [answer for prompt, answer in shown if "\n" not in prompt and "verify" not in prompt]
    verdicts = [
        answer
        for prompt, answer in shown
        if "verify>" in answer and "boxed{" in prompt and "=" in prompt.split("\n", 1)[1]
    ]
    bare = [answer for answer in verdicts if answer.startswith("<verify>")]
    assert abs(sum("=" not in answer for answer in first) / len(first) - 0.6) < 0.05
    assert abs(len(bare) / len(verdicts) - 0.5) < 0.05
    assert abs(sum("approve" in answer for answer in bare) / len(bare) - 0.8) < 0.06


def exchanges(habits: Habits, count: int) -> list[tuple[str, str]]:
    """Prompt and answer of demonstrations, as text without roles."""
    created = []
    for example in islice(demonstrations(habits, 0), count):
        start = int(np.flatnonzero(example.weights)[0])
        prompt, answer = example.tokens[:start].tolist(), example.tokens[start:].tolist()
        created.append((tokenizer().decode(prompt), tokenizer().decode(answer)))
    return created
