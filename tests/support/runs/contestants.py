"""Teams whose share of right answers is a number in their weights, for tests of contests.

tensors(skill) ──load──▶ SkilledEngine: right where seed % 100 < skill, so that two teams with the
                         same seeds differ exactly where their skills do
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rollout.config import EngineConfig
from storage.records.promotions import Team, TeamVersion
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import evaluations, runs
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.recipes.loader import load
from tasks.recipes.run_config import RunConfig
from tests.support.runs.builders import tensors
from tests.support.runs.fakes import ScriptedEngine, base_files, total
from tests.support.runs.small_run import RECIPE

POLICIES = ("solver", "verifier")
PROBLEMS = 12
CONTEST_RECIPE = (
    RECIPE
    + f"""\
  engine: {{name: "{__name__}:SkilledEngine", max_concurrent: 3}}
evaluation:
  prompts: {{builtin: chained_addition, split: test, limit: {PROBLEMS}}}
  dataset: held_out
  temperature: 0.5
gate:
  min_problems: 5
"""
)
TWO_DATASETS = {
    "gate.datasets": {
        "near": {"builtin": "chained_addition", "split": "test", "limit": PROBLEMS},
        "far": {"builtin": "chained_addition", "split": "test", "limit": PROBLEMS - 2, "seed": 5},
    }
}


class SkilledEngine(ScriptedEngine):
    """Answers by the skill in its weights, and records every request of all engines."""

    made: list["SkilledEngine"] = []
    asked_of_all: list[tuple[int, str, int]] = []
    """(skill, prompt, seed) of every request."""
    fails_on = ""
    """Part of a prompt at which the engine fails."""
    fails_with: type[Exception] = ValueError
    rejects = False
    """Whether the verifier rejects every first answer; the solver's second one is right."""

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        super().__init__(config, model_config)
        self.script = self._answer
        self.skill = -1
        self.made.append(self)

    async def load(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        await super().load(version, tensors)
        self.skill = int(tensors["model.scale"].bits)

    def _answer(self, prompt: str, seed: int) -> str:
        self.asked_of_all.append((self.skill, prompt, seed))
        if self.fails_on and self.fails_on in prompt:
            raise self.fails_with("the judge is away")
        if "<verify>" in prompt:
            return f"\\boxed{{{total(prompt)}}}"
        if "boxed" in prompt:
            return f"<verify>{'reject' if self.rejects else 'approve'}</verify>"
        return f"\\boxed{{{total(prompt) + (seed % 100 >= self.skill)}}}"

    @classmethod
    def forget(cls) -> None:
        """Forget the requests of an earlier contest."""
        cls.made.clear()
        cls.asked_of_all.clear()


def contest_config(**settings: object) -> RunConfig:
    """Return the recipe of contests with other settings; `__` stands for a dot."""
    return load(CONTEST_RECIPE, {key.replace("__", "."): value for key, value in settings.items()})


def create_contestants(
    store: ObjectStore,
    run_id: str,
    skills: Sequence[int],
    config: RunConfig | None = None,
    files: Mapping[str, bytes] | None = None,
) -> ObjectStore:
    """Create a run whose version n of each policy has the skill `skills[n]`, in percent."""
    config = config or contest_config()
    run = runs.create_run(store, run_id, config.model_dump(mode="json"))
    for policy in config.policies:
        for version, skill in enumerate(skills):
            extra = {} if version else {**base_files(), **(files or {})}
            publisher.publish(run, policy, version, tensors(skill), extra_files=extra)
    return run


def evaluate_as_best(run: ObjectStore, version: int) -> None:
    """Store an evaluation by which a version is right everywhere."""
    evaluations.create(
        run,
        Evaluation(
            versions=dict.fromkeys(POLICIES, version),
            dataset="held_out",
            workflow="actor_and_verify",
            rows=("a",),
            first_attempt=np.ones(1, np.float32),
            final=np.ones(1, np.float32),
        ),
    )


def team_of(run: ObjectStore, version: int) -> Team:
    """Return the team of one version of each policy."""
    return {policy: version_of(run, policy, version) for policy in POLICIES}


def version_of(run: ObjectStore, policy: str, version: int) -> TeamVersion:
    """Return one policy's version, as a team names it."""
    digest = manifests.read_manifest(run, policy, version).digest
    return TeamVersion(run_id=runs.run_id(run), version=version, digest=digest)
