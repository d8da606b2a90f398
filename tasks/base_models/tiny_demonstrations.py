"""Demonstrations of chained addition for the tiny base model: solver, verifier and retry, with and
without bad habits.

    solver    7+8-3=?                        →  7+8=15 ⏎ 15-3=12 ⏎ \\boxed{12}
    verifier  7+8-3=? ⏎ (a solution)         →  7+8=15:15y ⏎ 15-3=12:11n ⏎ <verify>reject</verify>
    retry     7+8-3=? ⏎ (a verifier's text)  →  7+8=15 ⏎ 15-3=12 ⏎ \\boxed{12}

A flagged line restates the step with the value found by computing it again, then the value that the
solution claims. Restating before judging is what makes the verifier learnable at this size. Knows
nothing of optimizers; `sft.py` trains.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from data_ops.prompts.chained_addition import problem, steps
from storage.records.types import Float32, Int32
from tasks.base_models.tiny_tokenizer import ASSISTANT, END, USER, token_id, tokenizer

SOLVER_SHARE, VERIFIER_SHARE = 0.40, 0.45
"""The rest are retries."""
SHOWN_WRONG_STEP, SHOWN_BARE_BOX = 0.35, 0.12
"""How the solutions shown to the verifier are spoiled."""
ERRORS = (-10, -2, -1, 1, 2, 10)
VERDICT_WEIGHT = 4.0
"""The loss of these few tokens would drown among the many that only copy."""
VERDICT_TOKENS = ("y", "n", "approve", "reject")
BARE_BOX_BELOW = 100

Chain = list[tuple[int, str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How often a demonstration is bad, as probabilities."""

    bare_box: float = 0.0
    """A solver's answer is a random number in a box."""
    wrong_step: float = 0.0
    """A step of a solver's answer is wrong, and carried on."""
    bare_retry: float = 0.0
    """A retry is a random number in a box."""
    bare_verdict: float = 0.0
    """A verifier's answer is a verdict without any step."""
    approves: float = 0.0
    """Such a bare verdict approves."""


SKILL = Habits()
"""Nothing but good answers."""
HABITS = Habits(bare_box=0.6, wrong_step=0.07, bare_retry=0.3, bare_verdict=0.5, approves=0.8)
"""A latent skill under bad habits, as in a real base model."""


class Demonstration(NamedTuple):
    """A prompt and the answer to learn, as tokens."""

    tokens: Int32
    """[L]"""
    weights: Float32
    """[L] weight of the token in the loss; 0 on the prompt."""


def demonstrations(habits: Habits, seed: int) -> Iterator[Demonstration]:
    """An endless, seeded mixture of the three kinds over problems of the split `train`."""
    random, index = Random(f"{seed}/{habits}"), 0
    emphasis = np.ones(tokenizer().get_vocab_size(), np.float32)
    emphasis[[token_id(token) for token in VERDICT_TOKENS]] = VERDICT_WEIGHT
    while True:
        question = problem(index, "train", seed).fields["question"]
        index += 1
        yield encode(*_texts(question, habits, random), emphasis)


def encode(prompt: str, answer: str, emphasis: Float32) -> Demonstration:
    """Tokens of one exchange. `emphasis` is [V]: the loss weight of every token of the vocabulary
    in an answer.
    """
    before = tokenizer().encode(f"{USER}{prompt}{END}{ASSISTANT}").ids
    after = tokenizer().encode(f"{answer}{END}").ids
    weights = np.concatenate([np.zeros(len(before), np.float32), emphasis[after]])
    return Demonstration(np.array(before + after, np.int32), weights)


def solution(chain: Chain) -> str:
    """A solver's answer that goes through the chain as given, right or wrong."""
    lines = [f"{left}{op}{right}={value}" for left, op, right, value in chain]
    return "\n".join([*lines, boxed(chain[-1][3])])


def boxed(value: int) -> str:
    return f"\\boxed{{{value}}}"


def verdict(approve: bool) -> str:
    return f"<verify>{'approve' if approve else 'reject'}</verify>"


def review(shown: Chain | None) -> str:
    """The good verifier's answer to a solution: up to the first wrong step. A bare box (None) is
    rejected.
    """
    if shown is None:
        return verdict(False)
    lines = []
    for left, op, right, claimed in shown:
        value = left + right if op == "+" else left - right
        lines.append(f"{left}{op}{right}={value}:{claimed}{'y' if claimed == value else 'n'}")
        if claimed != value:
            break
    return "\n".join([*lines, verdict(lines[-1].endswith("y"))])


def spoiled(chain: Chain, wrong_step: float, random: Random) -> Chain:
    """The chain with each step wrong with probability `wrong_step`, and what follows computed from
    the wrong value.
    """
    value, result = chain[0][0], []
    for _, op, right, _ in chain:
        left, value = value, value + right if op == "+" else value - right
        if random.random() < wrong_step:
            value += random.choice([error for error in ERRORS if error > 0 or value + error >= 0])
        result.append((left, op, right, value))
    return result


def _texts(question: str, habits: Habits, random: Random) -> tuple[str, str]:
    """The prompt and the answer of one demonstration."""
    kind, chain = random.random(), steps(question)
    if kind < SOLVER_SHARE:
        return question, _attempt(chain, habits.bare_box, habits.wrong_step, random)
    if kind < SOLVER_SHARE + VERIFIER_SHARE:
        shown = (
            None if random.random() < SHOWN_BARE_BOX else spoiled(chain, SHOWN_WRONG_STEP, random)
        )
        seen = _bare_box(random) if shown is None else solution(shown)
        return f"{question}\n{seen}", _judgement(shown, habits, random)
    return f"{question}\n{_rejection(chain, habits, random)}", _attempt(
        chain, habits.bare_retry, habits.wrong_step, random
    )


def _attempt(chain: Chain, bare_box: float, wrong_step: float, random: Random) -> str:
    if random.random() < bare_box:
        return _bare_box(random)
    return solution(spoiled(chain, wrong_step, random))


def _judgement(shown: Chain | None, habits: Habits, random: Random) -> str:
    if random.random() < habits.bare_verdict:
        return verdict(random.random() < habits.approves)
    return review(shown)


def _rejection(chain: Chain, habits: Habits, random: Random) -> str:
    """A verifier's text that leads to a retry: every step but the last in it was right."""
    if random.random() < max(SHOWN_BARE_BOX, habits.bare_verdict):
        return verdict(False)
    last = random.randrange(len(chain))
    return review([*chain[:last], *spoiled(chain[last : last + 1], 1.0, random)])


def _bare_box(random: Random) -> str:
    return boxed(random.randrange(BARE_BOX_BELOW))
