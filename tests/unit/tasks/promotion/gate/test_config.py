import pytest
from pydantic import ValidationError

from tasks.promotion.gate import GATE_TESTS
from tasks.promotion.gate.config import GateConfig
from tasks.promotion.gate.custom import CustomGateTest
from tasks.promotion.gate.mcnemar import McNemar
from tasks.promotion.gate.paired_bootstrap import PairedBootstrap


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("mcnemar", McNemar()),
        ({"name": "mcnemar", "mid_p": True}, McNemar(mid_p=True)),
        ({"name": "paired_bootstrap", "resamples": 500}, PairedBootstrap(resamples=500)),
        ("my_module:Test", CustomGateTest(name="my_module:Test")),
        ({"name": "my_module:Test", "args": {"a": 1}}, CustomGateTest(name="my_module:Test", args={"a": 1})),
    ],
)  # fmt: skip
def test_a_name_selects_the_test(test: object, expected: object) -> None:
    assert GateConfig.model_validate({"test": test}).test == expected


def test_the_table_lists_every_test() -> None:
    assert set(GATE_TESTS) == {"paired_bootstrap", "mcnemar", "custom"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test": {"name": "mcnemar", "resamples": 10}}, "resamples"),
        ({"test": "t_test"}, "t_test"),
        ({"confidence": 1.0}, "less than 1"),
        ({"confidence": 0.4}, "greater than or equal to 0.5"),
        ({"min_gain": -0.01}, "greater than or equal to 0"),
        ({"min_gain": 1.5}, "less than or equal to 1"),
        ({"max_loss": float("nan")}, "finite"),
        ({"max_loss_on": {"a": 2}}, "less than or equal to 1"),
        ({"min_problems": 0}, "greater than or equal to 1"),
        ({"test": {"name": "paired_bootstrap", "resamples": 99}}, "greater than or equal to 100"),
        ({"test": {"name": "paired_bootstrap", "resamples": 10**9}}, "less than or equal to 1000000"),
        (
            {"confidence": 0.995, "test": {"name": "paired_bootstrap", "resamples": 100}},
            r"100 resamples give no p value below 0\.0099, and confidence 0\.995 needs 0\.005; set test",
        ),
        ({"unknown": 1}, "unknown"),
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GateConfig.model_validate(settings)


def test_resamples_that_just_reach_the_confidence_are_accepted() -> None:
    GateConfig.model_validate(
        {"confidence": 0.99, "test": {"name": "paired_bootstrap", "resamples": 100}}
    )


def test_a_data_set_has_its_own_allowed_loss_or_that_of_all() -> None:
    config = GateConfig(max_loss=0.02, max_loss_on={"gsm8k": 0.0})
    assert (config.allowed_loss("gsm8k"), config.allowed_loss("math")) == (0.0, 0.02)
