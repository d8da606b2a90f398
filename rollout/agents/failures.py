"""Exceptions by which a workflow states why an episode failed.

    raise EnvironmentFailedError("the browser did not start")   ──▶  failure_kind: environment

The episode is neither rewarded nor trained on. A wrong answer is no failure: it has a reward of 0.
`rollout/service/episode_runner.py` maps these and all other exceptions to a `FailureKind`.
"""


class ModelFailedError(Exception):
    """The policy's output is not usable at all, such as text that fills the longest context."""


class EnvironmentFailedError(Exception):
    """The environment broke or gave no observation."""


class ToolFailedError(Exception):
    """A tool broke. A wrong call by the model is no failure: the tool's reply reports it."""


class RewardFailedError(Exception):
    """The reward gave no verdict. Raised around any other exception of a reward, its cause."""
