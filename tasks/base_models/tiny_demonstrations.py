"""Demonstrations of chained addition for the tiny base model, with and without bad habits.

    solver    7+8-3=?                        →  7+8=15 ⏎ 15-3=12 ⏎ \\boxed{12}
    verifier  7+8-3=? ⏎ (a solution)         →  7+8=15:15y ⏎ 15-3=12:11n ⏎ <verify>reject</verify>
    retry     7+8-3=? ⏎ (a verifier's text)  →  7+8=15 ⏎ 15-3=12 ⏎ \\boxed{12}

A line of the verifier repeats a calculation with its correct value, then the value that the
solution claims, and y or n. A model of this size learns to verify only if it calculates first.
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
"""Shares of solver and verifier demonstrations; the rest are retries."""
SHOWN_WRONG_STEP, SHOWN_BARE_BOX = 0.35, 0.12
"""Probabilities of a wrong calculation, and of a bare box, in solutions shown to the verifier."""
ERRORS = (-10, -2, -1, 1, 2, 10)
VERDICT_WEIGHT = 4.0
"""Loss weight of `VERDICT_TOKENS`, which are few among many copied tokens."""
VERDICT_TOKENS = ("y", "n", "approve", "reject")
BARE_BOX_BELOW = 100

Chain = list[tuple[int, str, int, int]]


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of bad demonstrations."""

    bare_box: float = 0.0
    """A solver's answer is a random number in a box."""
    wrong_step: float = 0.0
    """A calculation of a solver's answer is wrong, and the next ones continue from its value."""
    bare_retry: float = 0.0
    """A retry is a random number in a box."""
    bare_verdict: float = 0.0
    """A verifier's answer is a verdict without any calculation."""
    approves: float = 0.0
    """A bare verdict approves."""


SKILL = Habits()
"""Good answers only."""
HABITS = Habits(bare_box=0.6, wrong_step=0.07, bare_retry=0.3, bare_verdict=0.5, approves=0.8)
"""A latent skill under bad habits, as in a real base model."""


class Demonstration(NamedTuple):
    """A prompt and the answer to learn, as tokens."""

    tokens: Int32
    """[L]"""
    weights: Float32
    """[L] weight of the token in the loss; 0 on the prompt."""


def demonstrations(habits: Habits, seed: int) -> Iterator[Demonstration]:
    """Yield an endless, seeded mixture of the three kinds over problems of the split `train`."""
    random, index = Random(f"{seed}/{habits}"), 0
    emphasis = np.ones(tokenizer().get_vocab_size(), np.float32)
    emphasis[[token_id(token) for token in VERDICT_TOKENS]] = VERDICT_WEIGHT
    while True:
        question = problem(index, "train", seed).fields["question"]
        index += 1
        yield encode(*_texts(question, habits, random), emphasis)


def encode(prompt: str, answer: str, emphasis: Float32) -> Demonstration:
    """Tokenize one exchange; `emphasis` [V] are the loss weights of the vocabulary in an answer."""
    prompt_ids = tokenizer().encode(f"{USER}{prompt}{END}{ASSISTANT}").ids
    answer_ids = tokenizer().encode(f"{answer}{END}").ids
    weights = np.concatenate([np.zeros(len(prompt_ids), np.float32), emphasis[answer_ids]])
    return Demonstration(np.array(prompt_ids + answer_ids, np.int32), weights)


def solution(chain: Chain) -> str:
    """Return a solver's answer with the calculations of the chain, right or wrong."""
    lines = [f"{left}{op}{right}={value}" for left, op, right, value in chain]
    return "\n".join([*lines, boxed(chain[-1][3])])


def boxed(value: int) -> str:
    return f"\\boxed{{{value}}}"


def verdict(approve: bool) -> str:
    return f"<verify>{'approve' if approve else 'reject'}</verify>"


def review(shown: Chain | None) -> str:
    """Return the verifier's good answer, up to the first error; None stands for a bare box."""
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
    """Make each calculation wrong with probability `wrong_step`; errors propagate."""
    value, result = chain[0][0], []
    for _, op, right, _ in chain:
        left, value = value, value + right if op == "+" else value - right
        if random.random() < wrong_step:
            value += random.choice([error for error in ERRORS if error > 0 or value + error >= 0])
        result.append((left, op, right, value))
    return result


def _texts(question: str, habits: Habits, random: Random) -> tuple[str, str]:
    """Draw the prompt and the answer of one demonstration."""
    kind, chain = random.random(), steps(question)
    if kind < SOLVER_SHARE:
        return question, _attempt(chain, habits.bare_box, habits.wrong_step, random)
    if kind < SOLVER_SHARE + VERIFIER_SHARE:
        shown = (
            None if random.random() < SHOWN_BARE_BOX else spoiled(chain, SHOWN_WRONG_STEP, random)
        )
        solver_text = _bare_box(random) if shown is None else solution(shown)
        return f"{question}\n{solver_text}", _judgement(shown, habits, random)
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
    """Return a verifier's text that causes a retry: only its last calculation was wrong."""
    if random.random() < max(SHOWN_BARE_BOX, habits.bare_verdict):
        return verdict(False)
    last = random.randrange(len(chain))
    return review([*chain[:last], *spoiled(chain[last : last + 1], 1.0, random)])


def _bare_box(random: Random) -> str:
    return boxed(random.randrange(BARE_BOX_BELOW))
