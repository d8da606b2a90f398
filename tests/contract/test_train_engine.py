"""The contract of all train engines. A new engine subclasses `TrainEngineContract` and overrides
`engine_name`.

Steps are compared with `tests/support/models/plain_trainer.py`: weights and the value of every metric.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from storage.errors import CorruptError
from storage.formats.safetensors import from_safetensors, to_safetensors, weights_digest
from storage.records.rollouts import LOGPROB_MIN
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.models.plain_trainer import PlainTrainer
from tests.support.models.trainer_cases import (
    LINEAR,
    MODEL_CONFIG,
    PPO,
    VOCAB,
    base_weights,
    reference_model,
    sampled_batch,
)
from tests.support.runs.builders import batch, row
from trainer.config import TrainConfig
from trainer.engines.engine import TrainEngine, make_engine
from trainer.engines.torch.host_tensors import to_torch
from trainer.losses import LossConfig, M2po, PpoClip
from trainer.losses.corrections import IcePop, Rejection, TisSequence, TisToken

ORDINARY = TrainConfig(lr=1e-2, publish_dtype="F32")
SEED = 3
LOSSES = {
    "ppo_clip": PpoClip(clip_low=0.1, clip_high=0.3),
    "ppo_dual_clip": PpoClip(dual_clip=1.3),
    "adaptive_clip": M2po(m2_threshold=0.03),
    "adaptive_clip_wide_open": M2po(m2_threshold=3.0),
    "adaptive_dual_clip": M2po(m2_threshold=0.03, dual_clip=1.3),
    "token_mask": M2po(m2_form="token_mask", m2_threshold=0.03),
    "token_mask_dual_clip": M2po(m2_form="token_mask", m2_threshold=0.1, dual_clip=1.3),
    "water_filled": M2po(m2_form="water_filled", m2_threshold=0.25),
    "water_filled_default": M2po(m2_form="water_filled"),
    "water_filled_dual_clip": M2po(m2_form="water_filled", m2_threshold=0.25, dual_clip=1.3),
    "sequence_mean": M2po(m2_threshold=0.03, aggregate="sequence_mean"),
    "constant": M2po(m2_threshold=0.03, aggregate="constant", constant_length=20),
    "ppo_sequence_mean": PPO.model_copy(update={"aggregate": "sequence_mean"}),
    "ppo_constant": PPO.model_copy(update={"aggregate": "constant", "constant_length": 7}),
    "tis_token": PpoClip(correction=TisToken(cap=1.5)),
    "tis_sequence": PpoClip(correction=TisSequence(cap=1.2), aggregate="sequence_mean"),
    "icepop": PpoClip(correction=IcePop(low=0.7, high=1.6), clip_low=0.001, clip_high=0.001),
    "rejection": PpoClip(correction=Rejection(limit=1.3)),
    "rejection_max": M2po(
        correction=Rejection(ratio="max", limit=3.0), m2_form="token_mask", m2_threshold=0.02
    ),
}
ADAM = TrainConfig(
    loss=M2po(m2_threshold=0.03), lr=1e-2, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3, warmup_steps=4,
    grad_clip=0.2, minibatches=2, micro_batch_tokens=15, publish_dtype="F32",
)  # fmt: skip
"""No setting of the optimizer has a value without effect."""


def through_files(
    tensors: Mapping[str, HostTensor], state: Json
) -> tuple[dict[str, HostTensor], Json]:
    """Serialize and deserialize as a checkpoint does."""
    return from_safetensors(to_safetensors(tensors)), json.loads(json.dumps(state, allow_nan=False))


def moves(engine: TrainEngine, before: Mapping[str, HostTensor]) -> torch.Tensor:
    """Return the change of each weight in one vector; the published dtype is F32."""
    after = engine.weights()
    return torch.cat(
        [
            (to_torch(after[name]) - to_torch(before[name]).float()).flatten()
            for name in sorted(before)
        ]
    )


def plain_moves(plain: PlainTrainer, before: Mapping[str, HostTensor]) -> torch.Tensor:
    after = plain.weights()
    return torch.cat(
        [(after[name] - to_torch(before[name]).double()).flatten() for name in sorted(before)]
    )


def apart(item: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest absolute value of the second."""
    return float((item.double() - other).abs().max() / other.abs().max())


class EngineCallsContract:
    """What each call of an engine does and refuses, whatever the loss: also what can differ where
    only the way of a call, or of the weights, is another one.
    """

    engine_name = ""

    def built(self, config: TrainConfig) -> TrainEngine:
        return make_engine(config, MODEL_CONFIG, seed=SEED)

    def started(
        self, config: TrainConfig, weights: Mapping[str, HostTensor] | None = None
    ) -> TrainEngine:
        engine = self.built(config.model_copy(update={"engine": self.engine_name}))
        engine.set_weights(base_weights() if weights is None else weights)
        return engine

    def test_given_weights_are_published_bit_for_bit_and_a_tied_head_once(self) -> None:
        weights = base_weights()
        published = self.started(TrainConfig()).weights()
        assert weights_digest(published) == weights_digest(weights)
        assert "lm_head.weight" not in published
        assert published["model.norm.weight"].dtype == "BF16"

    def test_weights_that_do_not_fit_are_refused_by_name(self) -> None:
        weights = base_weights()
        engine = self.started(TrainConfig())
        norm = weights.pop("model.norm.weight")
        with pytest.raises(CorruptError, match=r"model\.norm\.weight"):
            engine.set_weights(weights)
        with pytest.raises(CorruptError, match=r"model\.surprise"):
            engine.set_weights(weights | {"model.norm.weight": norm, "model.surprise": norm})
        with pytest.raises(CorruptError, match=r"shapes for: model\.norm\.weight"):
            engine.set_weights(
                weights | {"model.norm.weight": weights["model.embed_tokens.weight"]}
            )

    def test_published_weights_do_not_follow_the_next_step(self) -> None:
        engine = self.started(ORDINARY)
        published = engine.weights()
        before = weights_digest(published)
        engine.step(sampled_batch(reference_model(base_weights())))
        assert weights_digest(published) == before
        assert weights_digest(engine.weights()) != before

    def test_bf16_weights_are_rounded_from_float32_masters(self) -> None:
        engine = self.started(TrainConfig(lr=1e-5))
        before = engine.weights()["model.norm.weight"].bits.copy()
        given = sampled_batch(reference_model(base_weights()))
        for step in range(1, 4):
            engine.step(replace(given, step=step))
        master = to_torch(engine.save()[0]["model/model.norm.weight"])
        published = engine.weights()["model.norm.weight"]
        assert published.bits.tolist() == before.tolist()  # 3e-5 is below half a BF16 step at 1
        assert not torch.equal(master, master.bfloat16().float())
        assert torch.equal(to_torch(published), master.bfloat16())

    def test_gradient_clipping_warm_up_and_decay_agree_with_adam(self) -> None:
        weights = base_weights()
        model = reference_model(weights)
        engine, plain = self.started(ADAM), PlainTrainer(ADAM, weights, SEED)
        for step in (1, 2, 3, 4, 5):
            given = sampled_batch(model, step, num_rows=5, noise=0.3)
            metrics, expected = engine.step(given), plain.step(given)
            assert metrics == pytest.approx(expected, rel=1e-4, abs=5e-6)
            assert apart(moves(engine, weights), plain_moves(plain, weights)) < 1e-4
            assert metrics["trainer/grad_norm"] > 2 * (ADAM.grad_clip or 0)

    def test_a_learning_rate_of_0_changes_no_weights_and_gives_metrics(self) -> None:
        weights = base_weights()
        weights["model.norm.weight"].bits[:4] = [0x8000, 0, 0x8000, 0]  # −0 and 0
        config = ADAM.model_copy(update={"lr": 0.0, "publish_dtype": "BF16"})
        engine, plain = self.started(config, weights), PlainTrainer(config, weights, SEED)
        model = reference_model(weights)
        for step in (1, 2):
            given = sampled_batch(model, step, num_rows=5, noise=0.3)
            metrics, expected = engine.step(given), plain.step(given)
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert metrics["trainer/lr"] == 0.0
            assert weights_digest(engine.weights()) == weights_digest(weights)
        resumed = self.started(config)
        resumed.load(*through_files(*engine.save()))
        assert weights_digest(resumed.weights()) == weights_digest(weights)

    def test_a_loaded_engine_continues_bit_for_bit(self) -> None:
        config = TrainConfig(lr=1e-3, warmup_steps=3, minibatches=2)
        model = reference_model(base_weights())
        straight = self.started(config)
        batches = [sampled_batch(model, step, noise=0.1) for step in range(1, 5)]
        for given in batches[:2]:
            straight.step(given)
        saved = through_files(*straight.save())
        resumed = self.started(config, base_weights(seed=9))
        resumed.load(*saved)
        for given in batches[2:]:
            assert straight.step(given) == resumed.step(given)
        assert weights_digest(straight.weights()) == weights_digest(resumed.weights())
        for (name, item), other in zip(
            straight.save()[0].items(), resumed.save()[0].values(), strict=True
        ):
            assert item.bits.tobytes() == other.bits.tobytes(), name

    def test_a_saved_state_is_not_changed_by_the_next_step(self) -> None:
        engine = self.started(ORDINARY)
        given = sampled_batch(reference_model(base_weights()))
        engine.step(given)
        tensors, state = engine.save()
        before = weights_digest(tensors), json.dumps(state)
        engine.step(replace(given, step=2))
        assert (weights_digest(tensors), json.dumps(state)) == before

    def test_setting_weights_resets_the_optimizer(self) -> None:
        given = sampled_batch(reference_model(base_weights()))
        fresh, used = self.started(ORDINARY), self.started(ORDINARY)
        used.step(given)
        used.set_weights(base_weights())
        fresh.step(given)
        used.step(given)
        assert weights_digest(fresh.weights()) == weights_digest(used.weights())

    def test_setting_weights_seeds_the_random_generators(self) -> None:
        first = self.started(ORDINARY).save()
        torch.rand(3)
        np.random.random()
        random.random()
        second = self.started(ORDINARY).save()
        assert weights_digest(first[0]) == weights_digest(second[0])
        assert json.dumps(first[1]) == json.dumps(second[1])

    def test_loading_restores_the_random_generators(self) -> None:
        engine = self.started(ORDINARY)
        tensors, state = through_files(*engine.save())
        torch.rand(3)
        np.random.random()
        random.random()
        engine.load(tensors, state)
        again = engine.save()
        assert weights_digest(again[0]) == weights_digest(tensors)
        assert json.loads(json.dumps(again[1])) == state

    def test_a_state_of_another_model_or_format_is_refused(self) -> None:
        engine = self.started(ORDINARY)
        engine.step(sampled_batch(reference_model(base_weights())))
        tensors, state = engine.save()
        with pytest.raises(CorruptError):
            engine.load({name: each for name, each in tensors.items() if "norm" not in name}, state)
        with pytest.raises(CorruptError):
            engine.load(tensors, state | {"format": 999})

    def test_an_invalid_row_is_named_and_changes_nothing(self) -> None:
        engine = self.started(ORDINARY)
        before = weights_digest(engine.weights())
        strange = replace(row(prompt=(1, 2), answer=(3, VOCAB)), min_version=0)
        with pytest.raises(
            CorruptError, match=r"row 1 of batches/solver/00000002\.arrow.*vocabulary of 24"
        ):
            engine.step(batch(row(prompt=(1,), answer=(2,)), strange, step=2))
        assert weights_digest(engine.weights()) == before

    def test_a_gradient_that_is_not_finite_is_skipped_and_counted(self) -> None:
        engine = self.started(ORDINARY.model_copy(update={"normalize_advantages": False}))
        before = weights_digest(engine.weights())
        hopeless = row(prompt=(1, 2), answer=(3, 4), logprob=-39.0, advantage=-1e30)  # e³⁶ · 10³⁰
        metrics = engine.step(batch(hopeless, step=1))
        assert metrics["trainer/skipped"] == 1.0
        assert all(np.isfinite(value) for value in metrics.values())
        assert weights_digest(engine.weights()) == before

    def test_rows_without_loss_tokens_have_no_gradient(self) -> None:
        engine = self.started(ORDINARY)
        before = weights_digest(engine.weights())
        silent = row(prompt=(1, 2, 3, 4), answer=())
        metrics = engine.step(batch(silent))
        assert metrics["trainer/tokens"] == 0.0
        assert weights_digest(engine.weights()) == before


class TrainEngineContract(EngineCallsContract):
    """The whole contract: with what each loss and each setting computes."""

    def test_a_tied_head_is_accepted_as_a_separate_tensor(self) -> None:
        weights = base_weights()
        both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
        assert weights_digest(self.started(TrainConfig(), both).weights()) == weights_digest(
            weights
        )

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_a_batch_sampled_by_the_same_weights_has_ratio_one(self, temperature: float) -> None:
        given = sampled_batch(reference_model(base_weights()), temperature=temperature)
        metrics = self.started(ORDINARY).step(given)
        assert metrics["trainer/ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["trainer/kl/mean"] == pytest.approx(0.0, abs=1e-6)

    @pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
    def test_a_step_is_the_gradient_of_its_loss_over_shuffled_minibatches(
        self, loss: LossConfig
    ) -> None:
        weights = base_weights()
        given = sampled_batch(reference_model(weights), num_rows=7, noise=0.6, temperature=0.8)
        config = LINEAR.model_copy(
            update={
                "loss": loss,
                "minibatches": 2,
                "lr": 1e3,
                "normalize_advantages": True,
                "micro_batch_tokens": 15,
            }
        )
        engine, plain = self.started(config), PlainTrainer(config, weights, SEED)
        metrics, expected = engine.step(given), plain.step(given)
        assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)
        assert apart(moves(engine, weights), plain_moves(plain, weights)) < 1e-4

    def test_a_gradient_below_the_limit_is_not_scaled(self) -> None:
        weights = base_weights()
        config = LINEAR.model_copy(update={"grad_clip": 100.0})
        given = sampled_batch(reference_model(weights), noise=0.3)
        engine, plain = self.started(config), PlainTrainer(config, weights, SEED)
        assert engine.step(given)["trainer/grad_norm"] == pytest.approx(
            plain.step(given)["trainer/grad_norm"], rel=1e-5
        )
        assert apart(moves(engine, weights), plain_moves(plain, weights)) < 1e-3

    def test_a_gradient_without_a_limit_is_not_scaled(self) -> None:
        weights = base_weights()
        given = sampled_batch(reference_model(weights), noise=0.3)
        rows = tuple(
            replace(item, advantages=item.advantages * np.float32(1e8)) for item in given.rows
        )
        config = LINEAR.model_copy(update={"grad_clip": None, "lr": 1e4, "eps": 1e12})
        limited = self.started(config.model_copy(update={"grad_clip": 1e7}))
        engine, plain = self.started(config), PlainTrainer(config, weights, SEED)
        metrics, expected = (
            engine.step(replace(given, rows=rows)),
            plain.step(replace(given, rows=rows)),
        )
        assert metrics["trainer/grad_norm"] == pytest.approx(
            expected["trainer/grad_norm"], rel=1e-4
        )
        assert metrics["trainer/grad_norm"] > 2e7
        assert apart(moves(engine, weights), plain_moves(plain, weights)) < 1e-3
        limited.step(replace(given, rows=rows))
        assert apart(moves(limited, weights), plain_moves(plain, weights)) > 0.5

    @pytest.mark.parametrize("form", ["adaptive_clip", "token_mask", "water_filled"])
    def test_a_dual_clip_limits_the_effect_of_one_token_on_a_step(self, form: str) -> None:
        """One token with A < 0 and ρ = e²⁵. The mask drops it where its moment is above the
        threshold; here it is not.
        """
        weights = base_weights()
        given = sampled_batch(reference_model(weights))
        strange = given.rows[0]
        at = int(np.flatnonzero(strange.loss_mask)[0])
        logprobs, advantages = strange.logprobs.copy(), strange.advantages.copy()
        logprobs[at] -= 25.0
        advantages[at] = -1.0
        rows = (replace(strange, logprobs=logprobs, advantages=advantages), *given.rows[1:])
        loss = M2po.model_validate({"m2_form": form, "m2_threshold": 1e3, "dual_clip": 3.0})
        config = LINEAR.model_copy(update={"loss": loss})
        engine, plain = self.started(config), PlainTrainer(config, weights, SEED)
        metrics, expected = (
            engine.step(replace(given, rows=rows)),
            plain.step(replace(given, rows=rows)),
        )
        assert metrics["trainer/grad_norm"] == pytest.approx(
            expected["trainer/grad_norm"], rel=1e-4
        )
        assert metrics["trainer/grad_norm"] < 10.0
        assert metrics["trainer/masked_share"] == pytest.approx(1 / metrics["trainer/tokens"])
        assert apart(moves(engine, weights), plain_moves(plain, weights)) < 1e-3

    @pytest.mark.parametrize(
        "loss",
        [
            PPO,
            PPO.model_copy(update={"aggregate": "sequence_mean", "dual_clip": 1.5}),
            PPO.model_copy(update={"aggregate": "constant", "constant_length": 20}),
            M2po(),
            M2po(m2_form="token_mask"),
            M2po(m2_form="water_filled"),
            PpoClip(correction=TisSequence()),
            PpoClip(correction=Rejection(limit=1.1)),
        ],
        ids=[
            "token_mean",
            "sequence_mean",
            "constant",
            "adaptive_clip",
            "token_mask",
            "water_filled",
            "tis_sequence",
            "rejection",
        ],
    )
    def test_the_gradient_does_not_depend_on_the_micro_batch_size(self, loss: LossConfig) -> None:
        weights = base_weights()
        given = sampled_batch(reference_model(weights), num_rows=10, noise=0.3)
        config = LINEAR.model_copy(update={"loss": loss, "normalize_advantages": True})
        whole, split = (
            self.started(config),
            self.started(config.model_copy(update={"micro_batch_tokens": 15})),
        )
        item, many = whole.step(given), split.step(given)
        together, apart = moves(whole, weights), moves(split, weights)
        assert float(together.norm()) > 0.1
        assert float((together - apart).abs().max()) < 2e-6 * float(together.abs().max()) + 1e-6
        assert many == pytest.approx(item, rel=1e-5, abs=1e-6)

    def test_activation_checkpointing_does_not_change_results(self) -> None:
        given = sampled_batch(reference_model(base_weights()))
        plain = self.started(ORDINARY)
        thrifty = self.started(ORDINARY.model_copy(update={"activation_checkpointing": True}))
        assert plain.step(given) == pytest.approx(thrifty.step(given), rel=1e-6)
        assert weights_digest(plain.weights()) == weights_digest(thrifty.weights())

    def test_tokens_with_positive_advantage_become_likelier_and_negative_ones_rarer(self) -> None:
        config = ORDINARY.model_copy(update={"normalize_advantages": False, "lr": 1e-3})
        model = reference_model(base_weights())
        for sign in (1.0, -1.0):
            plain = sampled_batch(model)
            rows = tuple(
                replace(each, advantages=np.where(each.loss_mask, sign, 0).astype(np.float32))
                for each in plain.rows
            )
            engine = self.started(config)
            engine.step(replace(plain, rows=rows))
            ratio = engine.step(replace(plain, rows=rows, step=2))["trainer/ratio/mean"]
            assert (ratio - 1.0) * sign > 1e-3

    def test_advantages_are_normalised_over_the_whole_batch(self) -> None:
        model = reference_model(base_weights())
        given = sampled_batch(model)
        rows = tuple(
            replace(
                each,
                advantages=np.where(each.loss_mask, 5 * each.advantages + 3, 0).astype(np.float32),
            )
            for each in given.rows
        )
        config = LINEAR.model_copy(update={"normalize_advantages": True, "minibatches": 2})
        item, other = self.started(config), self.started(config)
        item.step(given)
        other.step(replace(given, rows=rows))
        assert torch.allclose(
            moves(item, base_weights()), moves(other, base_weights()), rtol=1e-3, atol=1e-5
        )

    def test_metrics_of_rows_add_up_to_those_of_the_batch(self) -> None:
        rows = (
            row(version=1, reward=1.0, prompt=(1, 2), answer=(3, 4)),
            row(version=4, reward=0.0, answer=(5,)),
        )
        small = [replace(each, tokens=each.tokens % VOCAB) for each in rows]
        metrics = self.started(TrainConfig(warmup_steps=10)).step(batch(*small, step=6))
        assert metrics["trainer/tokens"] == 3.0
        assert metrics["trainer/sequences"] == 2.0
        assert metrics["trainer/reward/mean"] == 0.5
        assert metrics["trainer/staleness/mean"] == 2.5  # (5 − 1 + 5 − 4) / 2
        assert metrics["trainer/staleness/max"] == 4.0
        assert metrics["trainer/lr"] == pytest.approx(5e-6 * 0.6)

    def test_without_a_token_of_the_version_in_training_no_mismatch_is_measured(self) -> None:
        engine = self.started(ORDINARY)
        given = sampled_batch(reference_model(base_weights()))
        measured = {name for name in engine.step(given) if "mismatch" in name}
        assert {"trainer/mismatch/mean_abs", "trainer/mismatch/mean_abs/eu"} < measured
        later = engine.step(replace(given, step=2))
        assert not any("mismatch" in name for name in later)

    def test_weights_of_1_keep_the_gradient_and_are_measured(self) -> None:
        """Sampler and trainer agree, so the proximal policy is the sampler's, and the ratio 1."""
        weights = base_weights()
        given = sampled_batch(reference_model(weights))
        plain = self.started(LINEAR)
        corrected = self.started(
            LINEAR.model_copy(update={"loss": PpoClip(correction=IcePop(low=0.99, high=1.01))})
        )
        before, after = plain.step(given), corrected.step(given)
        assert apart(moves(corrected, weights), moves(plain, weights).double()) < 1e-4
        assert after.items() - before.items() >= {("trainer/correction/zero_share", 0.0)}
        assert after["trainer/correction/weight_mean"] == pytest.approx(1.0, abs=1e-6)
        assert after["trainer/kl/mean"] == pytest.approx(0.0, abs=1e-9)
        assert after["trainer/mismatch/mean_abs"] < 1e-5

    def test_a_sequence_that_is_rejected_has_no_gradient_and_keeps_its_weight(self) -> None:
        weights = base_weights()
        given = sampled_batch(reference_model(weights), num_rows=3)
        strange, *others = given.rows
        far = replace(strange, logprobs=np.where(strange.loss_mask, -9, 0).astype(np.float32))
        silent = replace(far, advantages=np.zeros_like(far.advantages))
        engine, plain = (
            self.started(LINEAR.model_copy(update={"loss": loss}))
            for loss in (PpoClip(correction=Rejection(limit=2.0)), PPO)
        )
        metrics = engine.step(replace(given, rows=(far, *others)))
        plain.step(replace(given, rows=(silent, *others)))
        assert apart(moves(engine, weights), moves(plain, weights).double()) < 1e-4
        share = int(far.loss_mask.sum()) / metrics["trainer/tokens"]
        assert metrics["trainer/correction/zero_share"] == pytest.approx(share)

    def test_minibatches_are_optimizer_steps(self) -> None:
        given = sampled_batch(reference_model(base_weights()), num_rows=6)
        config = ORDINARY.model_copy(update={"weight_decay": 0.0})
        item, two = self.started(config), self.started(config.model_copy(update={"minibatches": 2}))
        item.step(given)
        two.step(given)
        first, second = (moves(engine, base_weights()).abs() for engine in (item, two))
        # Adam's first step changes each weight by lr; two steps change some weights further.
        assert float(first.max()) == pytest.approx(0.01, rel=1e-2)
        assert float(second.max()) == pytest.approx(0.02, rel=1e-1)

    def test_weight_decay_applies_to_matrices_only(self) -> None:
        weights = base_weights()
        engine = self.started(
            ORDINARY.model_copy(update={"weight_decay": 0.5, "normalize_advantages": False})
        )
        given = sampled_batch(reference_model(weights))
        rows = tuple(
            replace(each, advantages=np.zeros_like(each.advantages)) for each in given.rows
        )
        engine.step(
            replace(given, rows=rows)
        )  # there is no gradient: only weight decay changes weights
        for name, tensor in engine.weights().items():
            before = to_torch(weights[name]).float()
            left = 1 - 0.01 * 0.5 if before.dim() >= 2 else 1.0
            assert torch.allclose(to_torch(tensor), before * left, rtol=1e-6, atol=0), name

    def test_the_least_log_probability_that_is_trained_on_does_not_skip_the_step(self) -> None:
        engine = self.started(ORDINARY)
        before = weights_digest(engine.weights())
        least = row(prompt=(1, 2), answer=(3, 4), logprob=LOGPROB_MIN, advantage=-1.0)
        other = row(prompt=(1,), answer=(2,), advantage=1.0)
        metrics = engine.step(batch(least, other, step=1))
        assert metrics["trainer/skipped"] == 0.0
        assert 1e12 < metrics["trainer/grad_norm"] < 1e17
        assert weights_digest(engine.weights()) != before


NORM = "optimizer/model.norm.weight/exp_avg"


def torch_state(left: int, following: int) -> HostTensor:
    """The state of torch's generator at another position."""
    bits = torch.get_rng_state().numpy().copy()
    bits[8:12] = np.array([left], np.int32).view(np.uint8)
    bits[16:24] = np.array([following], np.uint64).view(np.uint8)
    return HostTensor("U8", bits.shape, bits)


def floats(last: float) -> HostTensor:
    """[16] zeros and, as the last element, `last`."""
    values = np.zeros(16, np.float32)
    values[-1] = last
    return HostTensor("F32", (16,), values.view(np.uint32))


class TestTorchEngine(TrainEngineContract):
    engine_name = "torch"

    @pytest.mark.parametrize("micro_batch_tokens", [4096, 20])
    def test_an_on_policy_batch_has_ratio_1_whatever_the_dropout_of_the_config(
        self, micro_batch_tokens: int
    ) -> None:
        config = TrainConfig(
            engine=self.engine_name, loss=PPO, micro_batch_tokens=micro_batch_tokens
        )
        on_policy = sampled_batch(reference_model(base_weights()))
        measured = []
        for dropout in (0.0, 0.1):
            engine = make_engine(config, MODEL_CONFIG | {"attention_dropout": dropout}, seed=SEED)
            engine.set_weights(base_weights())
            measured.append(engine.step(on_policy))
        assert measured[0] == measured[1]
        assert measured[1]["trainer/ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert measured[1]["trainer/kl/mean"] == pytest.approx(0.0, abs=1e-9)

    @pytest.mark.parametrize(
        "missing", ["optimizer/model.norm.weight/exp_avg", "optimizer/model.norm.weight/"]
    )
    def test_an_optimizer_state_that_lacks_a_parameter_is_refused(self, missing: str) -> None:
        engine = self.started(ORDINARY)
        engine.step(sampled_batch(reference_model(base_weights())))
        tensors, state = engine.save()
        with pytest.raises(CorruptError, match="optimizer's state does not belong to this model"):
            engine.load(
                {name: each for name, each in tensors.items() if not name.startswith(missing)},
                state,
            )

    @pytest.fixture
    def saved(self) -> tuple[dict[str, HostTensor], Json]:
        """The state of an engine after a step, as it is read from a checkpoint."""
        engine = self.started(ORDINARY)
        engine.step(sampled_batch(reference_model(base_weights())))
        return through_files(*engine.save())

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("updates", None, "the engine's state is not a SavedState: updates: Field required"),
            ("updates", ["model.norm.weight"], "updates: Input should be an object"),
            ("updates", {"model.norm.weight": "x"}, "updates.model.norm.weight: Input should be a valid integer"),
            ("updates", {"model.norm.weight": -1}, "updates.model.norm.weight: Input should be greater than or equal to 0"),
            ("rng", None, "rng: Field required"),
            ("rng.python.words", [1], "rng.python.words: Tuple should have at least 625 items"),
            ("rng.python.words", [0] * 624 + [625], "the random states cannot be restored: invalid state"),
            ("rng.python.version", 9, "the random states cannot be restored: state with version 9"),
            ("rng.numpy.kind", "PCG64", "rng.numpy.kind: Input should be 'MT19937'"),
            ("rng.numpy.keys", [1], "rng.numpy.keys: Tuple should have at least 624 items"),
            ("rng.numpy.keys", [-1] * 624, "rng.numpy.keys.0: Input should be greater than or equal to 0"),
            ("rng.numpy.position", 625, "rng.numpy.position: Input should be less than or equal to 624"),
        ],
    )  # fmt: skip
    def test_a_state_of_another_form_is_refused(
        self, saved: tuple[dict[str, HostTensor], Json], path: str, value: object, message: str
    ) -> None:
        tensors, state = saved[0], json.loads(json.dumps(saved[1]))
        *folders, name = path.split(".")
        part = state
        for folder in folders:
            part = part[folder]
        if value is None:
            del part[name]
        else:
            part[name] = value
        with pytest.raises(CorruptError, match=re.escape(message)):
            self.started(ORDINARY).load(tensors, state)

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            ("rng/torch", None, "the random state of torch, rng/torch, is missing"),
            ("rng/torch", HostTensor("U8", (3,), np.zeros(3, np.uint8)), "the random states cannot be restored: "),
            ("rng/torch", HostTensor("F32", (3,), np.zeros(3, np.uint32)), "the random states cannot be restored: "),
            ("rng/torch", torch_state(624, 624), "rng/torch is at word 624 with 624 words left, of 624"),
            ("rng/torch", torch_state(0, 625), "rng/torch is at word 625 with 0 words left, of 624"),
            ("model/model.norm.weight", floats(np.nan), "model/model.norm.weight has an element that is not finite"),
            ("model/model.norm.weight", HostTensor("F64", (16,), np.full(16, 1e300)), "has an element that is not finite"),
            (NORM, HostTensor("F32", (1,), np.zeros(1, np.uint32)), f"{NORM} is F32 [1]; its parameter is F32 [16]"),
            (NORM, HostTensor("U8", (16,), np.zeros(16, np.uint8)), f"{NORM} is U8 [16]; its parameter is F32 [16]"),
            (NORM, floats(np.nan), f"{NORM} has an element that is not finite"),
            (NORM, floats(-np.inf), f"{NORM} has an element that is not finite"),
            (f"{NORM}_sq", floats(-1e-9), f"{NORM}_sq is a mean of squares and has a negative element"),
        ],
    )  # fmt: skip
    def test_a_tensor_that_does_not_fit_the_optimizer_or_the_generators_is_refused(
        self,
        saved: tuple[dict[str, HostTensor], Json],
        name: str,
        tensor: HostTensor | None,
        message: str,
    ) -> None:
        tensors = {key: each for key, each in saved[0].items() if key != name}
        assert len(tensors) == len(saved[0]) - 1
        if tensor is not None:
            tensors[name] = tensor
        with pytest.raises(CorruptError, match=re.escape(message)):
            self.started(ORDINARY).load(tensors, saved[1])
