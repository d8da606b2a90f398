"""Exceptions by which a workflow states why an episode failed.

    raise EnvironmentFailedError("the browser did not start")   ──▶  failure_kind: environment

The episode is neither rewarded nor trained on. A wrong answer is no failure: it has a reward of 0.
`rollout/service/episode_failures.py` maps these and all other exceptions to a `FailureKind`.
"""

from storage.formats.json_values import storable_text
from storage.import_path import message


class ModelFailedError(Exception):
    """The policy's output is not usable at all, such as text that fills the longest context."""


class EnvironmentFailedError(Exception):
    """The environment broke or gave no observation."""


class ToolFailedError(Exception):
    """A tool broke. A wrong call by the model is no failure: the tool's reply reports it."""


class RewardFailedError(Exception):
    """The reward gave no verdict. Raised around any other exception of a reward, its cause."""


def error_text(error: BaseException) -> str:
    """Return `Class: message` as storable text, also where the exception cannot give a message."""
    return storable_text(f"{type(error).__name__}: {message(error)}")
