"""Code that recipes of tests name by its import path, for runs that are too short to learn."""

from rollout.rewards.reward import Judgement
from storage.records.rollouts import Prompt
from tasks.promotion.gate.comparison import Accuracies, Comparison


class Parity:
    """A reward that half of all random answers get: a policy that is always wrong has gradients."""

    def __init__(self, timeout_s: float) -> None:
        pass

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        return Judgement(float(sum(map(ord, answer)) % 2))

    def close(self) -> None:
        pass


class AlwaysBetter:
    """A test of the gate that finds every candidate better."""

    def compare(
        self, champion_P: Accuracies, candidate_P: Accuracies, confidence: float
    ) -> Comparison:
        return Comparison(low=0.0, high=1.0, p_value=0.001)
