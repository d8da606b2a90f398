"""Runs with versions and evaluations in a memory store, for tests of promotions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from storage.promotion.outcomes import PlayConditions, TeamOutcomes
from storage.records.promotions import (
    DecisionKind,
    GateRow,
    GateVerdict,
    PromotionDecision,
    Requirement,
    TeamVersion,
)
from storage.run import evaluations, runs
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tasks.recipes.loader import load
from tests.support.runs import builders
from tests.support.runs.small_run import RECIPE

EVALUATED_RECIPE = (
    RECIPE
    + """\
evaluation:
  prompts: {builtin: chained_addition, split: test, limit: 4}
  dataset: held_out
"""
)
POLICIES = ("solver", "verifier")


def create_run(
    store: ObjectStore, run_id: str, versions: int = 3, recipe: str = EVALUATED_RECIPE
) -> ObjectStore:
    """Create a run whose policies have the versions 0 to `versions` - 1, each with other bits."""
    config = load(recipe)
    run = runs.create_run(store, run_id, config.model_dump(mode="json"))
    for policy in config.policies:
        for version in range(versions):
            files = {} if version else {"config.json": b"{}"}
            publisher.publish(run, policy, version, builders.tensors(version), extra_files=files)
    return run


def evaluate(run: ObjectStore, version: int, right: int, dataset: str = "held_out") -> None:
    """Store an evaluation of four problems, `right` of which the team solves in the end."""
    evaluations.create(
        run,
        Evaluation(
            versions=dict.fromkeys(POLICIES, version),
            dataset=dataset,
            workflow="actor_and_verify",
            rows=("a", "b", "c", "d"),
            first_attempt=np.array([1, 1, 1, 1], np.float32),
            final=np.array([1] * right + [0] * (4 - right), np.float32),
        ),
    )


def team(run: ObjectStore, run_id: str, version: int) -> Mapping[str, TeamVersion]:
    """Return the team of one version of each policy."""
    return {
        policy: TeamVersion(
            run_id=run_id,
            version=version,
            digest=manifests.read_manifest(run, policy, version).digest,
        )
        for policy in POLICIES
    }


CONDITIONS = PlayConditions(
    dataset="gsm8k",
    prompts="5d0c",
    samples=2,
    seed=7,
    weights={"solver": "sha256:9f"},
    models={"solver": "91be"},
    settings={"workflow": {"name": "single_turn", "args": {"x": [1, 2.5, None]}}},
)
PLAYED = TeamOutcomes(
    conditions=CONDITIONS,
    problems=("a", "b", "c"),
    accuracies=np.array([[1, 0], [0.25, np.nan], [0, 1]], np.float32),
    created_s=5.0,
    seconds=2.5,
)

ROW = GateRow(
    dataset="gsm8k", problems=0, champion_failed=1, candidate_failed=2, champion=0.4,
    candidate=0.5, gain=0.1, low=-0.1, high=0.3, p_value=0.2, requirement=Requirement.GAIN,
    required=0.0, passed=False, why="too few",
)  # fmt: skip


def gate_decision(number: int, name: str = "tiny-1.7b", **fields: Any) -> PromotionDecision:
    """Decision of a gate, with every field set."""
    given: dict[str, Any] = {
        "kind": DecisionKind.REJECTED,
        "at_s": 1700000000.0,
        "by": "ada",
        "reason": "no gain",
        "team": {"solver": TeamVersion(run_id="tiny-1", version=40, digest="9f")},
        "returns_to": 2,
        "gate": GateVerdict(
            passed=False, reason="no", test="mcnemar", confidence=0.95, rows=(ROW,)
        ),
        **fields,
    }
    return PromotionDecision(name=name, number=number, **given)
