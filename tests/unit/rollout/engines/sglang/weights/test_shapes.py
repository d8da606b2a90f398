import pytest

from rollout.engines.sglang.weights import shapes as module
from rollout.engines.sglang.weights.shapes import model_shapes
from storage.errors import ConfigError
from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights
from tests.support.recorded import first_arguments

SHAPES = {name: tensor.shape for name, tensor in base_weights().items()}
GIVEN = list(SHAPES.values())


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """Configurations of which this process makes a model."""
    return first_arguments(monkeypatch, module, "_skeleton")


def test_a_plain_model_and_another_one_have_the_shapes_of_their_tensors(
    built_here: list[Json],
) -> None:
    plain = model_shapes(MODEL_CONFIG, GIVEN)
    assert built_here == [MODEL_CONFIG]
    assert plain == ({**SHAPES, "lm_head.weight": (24, 16)}, frozenset({"lm_head.weight"}))
    assert model_shapes(MODEL_CONFIG | {"num_labels": 3}, GIVEN) == plain
    assert built_here == [MODEL_CONFIG]


def test_a_model_that_takes_long_or_has_many_tensors_is_not_built_here(
    built_here: list[Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = MODEL_CONFIG | {"num_labels": 3}
    with pytest.raises(ConfigError, match="there are 1 tensors, and the model of their config"):
        model_shapes(labels | {"num_hidden_layers": 300}, [(16, 24)])
    with pytest.raises(ConfigError, match="transformers cannot build the model of this config"):
        model_shapes(labels | {"hidden_act": "nope"}, GIVEN)
    monkeypatch.setattr(module, "BUILD_CPU_S", 0.05)
    with pytest.raises(
        ConfigError,
        match=r"config\.json within 0.05 s of CPU time and 2,048 MiB beside its tensors: it used up",
    ):
        model_shapes(labels, GIVEN)
    assert built_here == []
