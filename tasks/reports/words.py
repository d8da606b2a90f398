"""The words of the report and of the page of episodes, with their meanings, for readers of a page.

Words that `docs/glossary.md` defines have the same definition there. Names of accuracies are made
of the run's own policies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.run.evaluations import SOLO_WORKFLOW

WORDS = {
    "policy": "one model that is trained, by its name in the recipe: `solver`, `verifier`",
    "version": "the weights of a policy after that number of steps; version 0 is the base model",
    "step": "one training step: batch n turns version n−1 into version n",
    "order": "the unit of rollout work: some prompts, and how many samples of each",
    "episode": "one execution of a workflow on one prompt",
    "group": "all episodes of one prompt of one order",
    "sequence": "the tokens of one model context in an episode",
    "shard": "the stored result of one order: its groups",
    "reward": "a number for an episode or a sequence",
    "failure kind": "why an episode failed: `model`, `environment`, `tool`, `reward`, `timeout`, "
    "`infrastructure`, `workflow_bug`",
    "region": "a named place where workers run; it may have a mirror",
    "owner": "the policy that sampled a token; tokens of prompts, tools and environments have none",
    "behaviour policy": "the version that sampled a token",
    "staleness": "the version in training minus the oldest version that sampled a token of the "
    "sequence",
    "mismatch": "the difference between sampler and trainer in the log-probability of a token for "
    "one version of the weights",
    "ledger": "the fates of all sequences of a policy, stored in its batches",
    "fate": "what happened to a sequence for a policy: trained, replayed, filtered, expired, "
    "waiting",
    "trained": "of a sequence: in the batch of a training step",
    "replayed": "of a sequence: in a batch again, because a replay algorithm selected it",
    "filtered": "of a sequence: dropped by the named filter or check; `zero_advantage`: all "
    "episodes of its group have the same reward, so nothing can be learned from it",
    "expired": "of a sequence: too stale to be trained on before it was needed",
    "waiting": "of a sequence: not decided yet; it waits after the newest batch, or no batch has "
    "ingested its shard",
    "advantage": "how much better than its group an episode was; positive: its tokens become more "
    "likely",
    "log p": "the natural logarithm of the probability with which a token was sampled",
    "right, wrong": "of an episode: the final answer is or is not correct",
    "mended, spoiled": "of an episode: the first attempt was wrong and the final answer is right, "
    "or the other way round",
    "held out": "of problems: never trained on",
    "evaluation": "one execution of the workflow on the held-out prompts with a fixed version of "
    "each policy, and its result",
    "member": "one instance of a service that the supervisor watches: `trainer-solver`, "
    "`rollout-us-east-0`",
    "KL": "an estimate of the distance between two policies, in nats; 0: they are equal",
    "entropy": "how uncertain a policy is about its next token, in nats",
}
"""Word → meaning; what a recipe or an object contains is between backticks."""


@dataclass(frozen=True)
class ScoreNames:
    """Names of a run's accuracies. Example: `ScoreNames(["solver", "verifier"], "solver")`."""

    policies: Sequence[str]
    answering: str
    """The policy that makes the first attempts; empty where it is not known yet."""

    def of(self, workflow: str) -> str:
        """Return the name of the accuracy of a workflow."""
        if len(self.policies) == 1:
            (policy,) = self.policies
            return policy if workflow == SOLO_WORKFLOW else f"{policy} ({workflow})"
        if workflow != SOLO_WORKFLOW:
            return f"team ({workflow})"
        return f"{self.answering} alone" if self.answering else "first attempts"
