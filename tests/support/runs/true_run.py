"""A complete run in a store, made by the real dataflow with scripted answers and weights, for tests
of `verify` and of damage.
"""

from collections.abc import Mapping

from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.service import Dataflow
from data_ops.prompts import BuiltinPrompts
from storage.records.rollouts import Episode, Group, Order, Sequence, Shard
from storage.records.windows import PromptWindow
from storage.run import batches, orders, shards
from storage.run.runs import create_run
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs.builders import episode, sequence, tensors

STEPS = 4
BATCH_SIZE = 6
POLICIES = ("solver", "verifier")
MAX_STALENESS = 2
ROUNDS_MAX = 200


def finished_run(
    store: ObjectStore,
    run_id: str = "true",
    steps: int = STEPS,
    windows: Mapping[str, PromptWindow] | None = None,
) -> ObjectStore:
    """A run whose two policies both reached version `steps`: contiguous, balanced, with correct
    digests.
    """
    data = DataConfig(
        prompts=BuiltinPrompts(builtin="chained_addition"),
        samples_per_prompt=4,
        prompts_per_order=2,
        max_staleness=MAX_STALENESS,
    )
    config = {
        "steps": steps,
        "policies": {key: {"batch_size": BATCH_SIZE} for key in POLICIES},
        "data": data.model_dump(mode="json"),
    }
    run = create_run(store, run_id, config, windows=windows or {})
    versions = dict.fromkeys(POLICIES, 0)
    digests: dict[str, dict[int, str]] = {policy: {} for policy in POLICIES}
    for policy in POLICIES:
        digests[policy][0] = publisher.publish(
            run, policy, 0, tensors(0), extra_files={"config.json": b"{}"}
        ).digest
    dataflow = Dataflow(
        run,
        data,
        dict.fromkeys(POLICIES, PolicyData(batch_size=BATCH_SIZE, steps=steps)),
        seed=0,
        max_tokens=512,
    )
    answered = 0
    for _ in range(ROUNDS_MAX):
        if min(versions.values()) == steps:
            return run
        dataflow.round()
        if orders.next_number(run) > answered:
            shards.create(run, _answer(orders.read(run, answered), versions, digests))
            answered += 1
        for policy in POLICIES:
            version = versions[policy] + 1
            if version <= steps and batches.exists(run, policy, version):
                digests[policy][version] = publisher.publish(
                    run, policy, version, tensors(version)
                ).digest
                versions[policy] = version
    raise AssertionError("the run does not end")


def _answer(order: Order, versions: dict[str, int], digests: dict[str, dict[int, str]]) -> Shard:
    """Rewards differ within every group, except for the second prompt of every third order, which
    the filter drops.
    """
    groups = []
    for at, prompt in enumerate(order.prompts):
        same = at == 1 and order.number % 3 == 0
        plays = [
            _play(order.number, at, sample, versions, same)
            for sample in range(order.samples_per_prompt)
        ]
        groups.append(Group(prompt, tuple(plays)))
    held = {policy: {versions[policy]: digests[policy][versions[policy]]} for policy in POLICIES}
    return Shard(
        order=order.number,
        attempt=0,
        worker="rollout-us-east-0",
        region="us-east",
        groups=tuple(groups),
        weights=held,
        started_s=1700000000.0,
        finished_s=1700000001.0,
    )


def _play(number: int, at: int, sample: int, versions: dict[str, int], same: bool) -> Episode:
    right = 0.0 if same else float(sample % 2)
    answer = (40 + sample, 50 + at, 2 + number % 30)
    attempt: Sequence = sequence(
        answer=answer, policy="solver", version=versions["solver"], reward=right
    )
    verdict = sequence(
        answer=(60 + sample, 2),
        policy="verifier",
        version=versions["verifier"],
        reward=right,
        starts_episode=False,
    )
    return episode(attempt, verdict, reward=right, first_attempt=right, final=right)
