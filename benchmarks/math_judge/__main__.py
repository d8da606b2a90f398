"""Measure errors and speed of the math judge and of plain math-verify on the same answers.

Labelled answers are made from the golds of real problem sets: rewritten so that they stay right
(other spelling, units, thousands, scientific notation, equations, …), or changed so that they are
wrong (off by one, other exponent, an uncomputed part, other order, …). `forms` are pairs in the
forms of golds of MATH and of olympiads. A right answer that is refused is a false negative, a wrong
one that is accepted a false positive; a pair without a verdict is a timeout.

`judge` is the judge of a worker: a direct comparison, and math-verify in a child process if the
direct comparison leaves a pair undecided. `math-verify` is the library in ordinary use: gold and
answer in a box, with the library's timeouts. Times are CPU seconds, including children. The last
line is the speed of a worker's reward for groups of equal answers.
"""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

from benchmarks import command_line
from benchmarks.math_judge.labels import Labelled, labelled
from benchmarks.math_judge.pairs import EQUAL, UNEQUAL
from rollout.rewards.box import last_box
from rollout.rewards.judge_process import Judge, JudgeTimeoutError
from rollout.rewards.math_answers.comparison import equal
from rollout.rewards.math_reward import MathReward
from storage.records.rollouts import Prompt
from storage.records.types import Json

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
TIMEOUT_S = 5.0
EXAMPLES_MAX = 5
"""Examples shown of each kind of error."""

Verdict = bool | None
"""None for a timeout."""


@dataclass(kw_only=True)
class Agreement:
    """Errors and time of one judge on one set."""

    false_negatives: int = 0
    false_positives: int = 0
    timeouts: int = 0
    cpu_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    """Number of errors, by the change that made the answer."""
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, pair: Labelled, verdict: Verdict) -> None:
        if verdict == pair.right:
            return
        if verdict is None:
            self.timeouts += 1
        elif pair.right:
            self.false_negatives += 1
        else:
            self.false_positives += 1
        change = f"{'right' if pair.right else 'wrong'}: {pair.change}"
        self.errors[change] = self.errors.get(change, 0) + 1
        if len(self.examples.setdefault(change, [])) < EXAMPLES_MAX:
            self.examples[change].append((pair.answer, pair.gold))


Row = Callable[[Json], str]


def golds_of(data: Path) -> dict[str, list[str]]:
    """Read the distinct golds of every problem set in the folder."""
    sources: dict[str, tuple[str, Row]] = {
        "svamp": ("math_eval/svamp/test.jsonl", lambda row: str(row["Answer"])),
        "aime24": ("math_eval/aime24/test.jsonl", lambda row: str(row["answer"])),
        "amc23": ("math_eval/amc23/test.jsonl", lambda row: str(row["answer"])),
        "minerva_math": (
            "math_eval/minerva_math/test.jsonl",
            lambda row: last_box(row["solution"]) or "",
        ),
        "gsm8k": ("gsm8k/test.jsonl", lambda row: row["answer"].rpartition("####")[2].strip()),
    }
    return {
        name: sorted({read(row) for row in _rows(data / file)})
        for name, (file, read) in sources.items()
    }


def _rows(file: Path) -> list[Json]:
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.is_file()
        else []
    )


def forms() -> list[Labelled]:
    """Return the labelled pairs of `benchmarks.math_judge.pairs`."""
    pairs = [(pair, True) for pair in EQUAL] + [(pair, False) for pair in UNEQUAL]
    return [Labelled(answer, gold, right, "form") for (answer, gold), right in pairs]


def with_judge(pairs: Sequence[Labelled]) -> tuple[list[Verdict], int]:
    """Return the verdicts of this project's judge, and how many are direct comparisons."""
    verdicts: list[Verdict] = []
    direct = 0
    child: Judge | None = None
    for pair in pairs:
        verdict = equal(pair.answer, pair.gold)
        direct += verdict is not None
        if verdict is None:
            child = child or Judge()
            try:
                verdict = child.ask(pair.answer, pair.gold, TIMEOUT_S)
            except JudgeTimeoutError:
                child.close()
                child = None
        verdicts.append(verdict)
    if child is not None:
        child.close()
    return verdicts, direct


def with_math_verify(pairs: Sequence[Labelled]) -> tuple[list[Verdict], int]:
    """Return the verdicts of math-verify alone."""
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def verdict(pair: Labelled) -> Verdict:
        try:
            gold, answer = (
                parse(f"\\boxed{{{text}}}", latex, raise_on_error=True)
                for text in (pair.gold, pair.answer)
            )
            return bool(verify(gold, answer, raise_on_error=True))
        except TimeoutException:
            return None
        except Exception:  # it raises any type; a reward counts that as wrong
            return False

    return [verdict(pair) for pair in pairs], 0


def measure(
    judge: Callable[[Sequence[Labelled]], tuple[list[Verdict], int]], pairs: Sequence[Labelled]
) -> tuple[Agreement, int]:
    score = Agreement()
    before_s = _cpu_s()
    verdicts, direct = judge(pairs)
    score.cpu_s = _cpu_s() - before_s
    for pair, verdict in zip(pairs, verdicts, strict=True):
        score.add(pair, verdict)
    return score, direct


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def compare(name: str, golds: int, pairs: Sequence[Labelled]) -> Json:
    ours, direct = measure(with_judge, pairs)
    theirs, _ = measure(with_math_verify, pairs)
    return {
        "set": name,
        "golds": golds,
        "right": sum(pair.right for pair in pairs),
        "wrong": sum(not pair.right for pair in pairs),
        "direct": direct,
        "judge": {**asdict(ours), "pairs_per_cpu_s": len(pairs) / ours.cpu_s},
        "math-verify": {**asdict(theirs), "pairs_per_cpu_s": len(pairs) / theirs.cpu_s},
    }


def groups(golds: Iterable[str], samples: int) -> Json:
    """Measure a worker's reward on golds that need algebra, with `samples` equal answers each."""
    texts = [
        (gold, f"so \\boxed{{{gold}+0}}") for gold in golds if equal(f"{gold}+0", gold) is None
    ]

    async def score() -> None:
        reward = MathReward(TIMEOUT_S)
        try:
            prompts = [
                (Prompt("p", {"question": "", "answer": gold}), text)
                for gold, text in texts
                for _ in range(samples)
            ]
            await asyncio.gather(*(reward.score(text, prompt) for prompt, text in prompts))
        finally:
            reward.close()

    before_s = _cpu_s()
    asyncio.run(score())
    cpu_s = _cpu_s() - before_s
    return {
        "golds": len(texts),
        "samples": samples,
        "cpu_s": cpu_s,
        "answers_per_cpu_s": len(texts) * samples / cpu_s,
    }


def main() -> None:
    arguments = parse_arguments()
    random = Random(arguments.seed)
    sets = {"forms": (len({gold for _, gold in EQUAL + UNEQUAL}), forms())}
    golds_by_set = golds_of(Path(arguments.data))
    for name, golds in golds_by_set.items():
        drawn = random.sample(golds, min(arguments.golds, len(golds)))
        sets[name] = len(drawn), [pair for gold in drawn for pair in labelled(gold)]
    results = [compare(name, golds, pairs) for name, (golds, pairs) in sets.items() if pairs]
    same = groups(
        [gold for gold in golds_by_set["minerva_math"] if "\\frac" in gold][: arguments.golds],
        arguments.samples,
    )
    if arguments.json:
        print(json.dumps({"arguments": vars(arguments), "sets": results, "groups": same}, indent=2))
        return
    for result in results:
        print(
            f"{result['set']}: {result['golds']} golds, {result['right']} right and "
            f"{result['wrong']} wrong answers"
        )
        for side in ("judge", "math-verify"):
            score = result[side]
            print(
                f"  {side:12} {score['false_negatives']:6,} false negatives "
                f"{score['false_positives']:6,} false positives "
                f"{score['timeouts']:4} timeouts {score['pairs_per_cpu_s']:9,.0f} pairs/CPU s"
            )
            if side == "judge" or arguments.errors:
                for change, count in score["errors"].items():
                    examples = "; ".join(
                        f"{answer} for {gold}" for answer, gold in score["examples"][change]
                    )
                    print(f"    {count:5} {change}: {examples}")
        print(f"  decided directly: {result['direct'] / (result['right'] + result['wrong']):.1%}")
    print(
        f"groups of {same['samples']} equal answers that need algebra: "
        f"{same['answers_per_cpu_s']:,.0f} answers/CPU s"
    )


def parse_arguments() -> argparse.Namespace:
    parser = command_line.parser("math_judge", __doc__, "--golds 50 --json")
    parser.add_argument(
        "--data", default=str(DATA), help="folder with the problem sets (default: ../shared/data)"
    )
    parser.add_argument(
        "--golds", type=int, default=150, help="golds drawn from each set (default: 150)"
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="equal answers in a group (default: 8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the draw (default: 0)")
    parser.add_argument("--errors", action="store_true", help="also show the errors of math-verify")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
