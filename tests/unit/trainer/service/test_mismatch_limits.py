"""The limits of the mismatch, with an engine that reports given values."""

import logging
import math

import pytest

from storage.errors import ConfigError
from storage.records.batches import Batch
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs.lifetimes import lifetime_of
from tests.unit.trainer.service.test_trainer import (
    BEFORE_STEP,
    CONFIG,
    POLICY,
    CountingEngine,
    add_batches,
    published,
    weight_of,
)
from trainer.config import MismatchLimits, TrainConfig
from trainer.service.mismatch_limits import Finding
from trainer.service.trainer import train

MEASURED: dict[int, float] = {}
"""Step → mean |Δ log p| that the engine reports; absent: nothing was measured."""


class MismatchedEngine(CountingEngine):
    def step(self, batch: Batch) -> dict[str, float]:
        metrics = super().step(batch)
        if batch.step in MEASURED:
            value = MEASURED[batch.step]
            metrics["trainer/mismatch/mean_abs"] = value
            metrics["trainer/mismatch/tokens"] = 30.0
            metrics["trainer/mismatch/mean_abs/eu"] = 2 * value
            metrics["trainer/mismatch/mean_abs/us-east"] = value / 2
            metrics["trainer/mismatch/k3/us-east"] = 9.0
        return metrics


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    files = {"config.json": b'{"model_type": "counting"}'}
    publisher.publish(memory_store, POLICY, 0, weight_of(0), extra_files=files)
    return memory_store


@pytest.fixture(autouse=True)
def _nothing_measured() -> None:
    MEASURED.clear()


def limited(warn: float | None = None, stop: float | None = None) -> TrainConfig:
    return CONFIG.model_copy(
        update={
            "engine": f"{__name__}:MismatchedEngine",
            "mismatch": MismatchLimits(warn=warn, stop=stop),
        }
    )


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_mismatch_above_stop_ends_the_trainer_before_it_publishes_the_version(
    run: ObjectStore, attempts: int
) -> None:
    """A resumed trainer ends with the same message: the supervisor does not restart it for ever."""
    add_batches(run, 1, 2, 3)
    MEASURED.update({1: 0.2, 2: 0.25})
    for _ in range(attempts):
        with pytest.raises(ConfigError) as error:
            train(
                lifetime_of(run, "trainer"),
                POLICY,
                limited(stop=0.2),
                3,
                0,
                batch_size=1,
                max_tokens=512,
            )
        assert str(error.value) == (
            "step 2 of solver: sampler and trainer disagree on log-probabilities by 0.25 a token "
            "(mean of 30 tokens of version 1, 0.5 in region eu), above "
            "policies.solver.train.mismatch.stop 0.2. Version 2 was not published. Make the two "
            "compute alike (rollout.engine.dtype, policies.solver.train.publish_dtype, top_p and top_k "
            "off), "
            "correct for the difference with policies.solver.train.loss.correction (tis_token, "
            "icepop, rejection), or raise the limit; then start a new run: this one keeps its "
            "settings, and stops here again when it is resumed"
        )
        assert published(run) == [0, 1]


def test_a_mismatch_above_warn_is_noted_once_until_it_falls_below(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    add_batches(run, 1, 2, 3, 4, 5, 6)
    MEASURED.update({1: 0.1, 2: 0.2, 3: 0.3, 5: 0.1, 6: 0.4})
    lifetime = lifetime_of(run, "trainer")
    with caplog.at_level(logging.WARNING):
        train(lifetime, POLICY, limited(warn=0.1, stop=0.5), 6, 0, batch_size=1, max_tokens=512)
    warnings = [
        record.getMessage() for record in caplog.records if "disagree" in record.getMessage()
    ]
    assert [warning.split(":")[0] for warning in warnings] == [
        "step 2 of solver",
        "step 6 of solver",
    ]
    assert warnings[1].endswith("(mean of 30 tokens of version 5, 0.8 in region eu), "
                                "above train.mismatch.warn 0.1")  # fmt: skip
    assert published(run) == [0, 1, 2, 3, 4, 5, 6]


def test_the_note_of_a_mismatch_ends_with_it(run: ObjectStore) -> None:
    add_batches(run, 1, 2, 3)
    MEASURED.update({1: 0.2, 2: 0.1})
    lifetime = lifetime_of(run, "trainer")
    notes: list[str] = []
    BEFORE_STEP[77] = lambda batch: notes.append(lifetime.heartbeat.last.note)
    train(lifetime, POLICY, limited(warn=0.15), 3, 77, batch_size=1, max_tokens=512)
    assert [note[:25] for note in notes] == [
        "starts from version 0",
        "step 1 of solver: sampler",
        "",
    ]


def test_a_step_without_measured_tokens_has_no_limit(run: ObjectStore) -> None:
    add_batches(run, 1)
    train(
        lifetime_of(run, "trainer"), POLICY, limited(stop=1e-9), 1, 0, batch_size=1, max_tokens=512
    )
    assert published(run) == [0, 1]


def test_a_finding_without_regions_names_none() -> None:
    finding = Finding.of({"trainer/mismatch/mean_abs": 0.5, "trainer/mismatch/tokens": 2.0})
    assert finding == Finding(value=0.5, tokens=2)
    assert finding.warning("solver", 3, 0.25) == (
        "step 3 of solver: sampler and trainer disagree on log-probabilities by 0.5 a token "
        "(mean of 2 tokens of version 2), above train.mismatch.warn 0.25"
    )


def test_a_mismatch_that_is_not_finite_is_above_every_limit() -> None:
    finding = Finding.of({"trainer/mismatch/tokens": 5.0})
    assert finding is not None
    assert (finding.value, finding.tokens) == (math.inf, 5)
    assert Finding.of({"trainer/mismatch/tokens": 0.0}) is None
    assert Finding.of({}) is None
