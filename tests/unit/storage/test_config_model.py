"""Every number of a recipe has bounds, and an error names the key, the value, the line and the bound."""

import math
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from storage import config_model
from storage.errors import ConfigError
from tasks.recipes.loader import load
from tasks.recipes.run_config import RunConfig

RECIPE = """\
steps: 4
policies:
  solver: {model: {tiny: {}}}
data:
  prompts: {builtin: chained_addition}
evaluation:
  prompts: {builtin: chained_addition, split: test, limit: 8}
"""
NOT_FINITE = (".inf", "-.inf", ".nan")
TOO_FAR = ("1e30", "-1e30", "9" * 400)


def _numbers(
    model: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Each numeric field below a model, with its key in a recipe: of policies `solver`, of regions
    `us-east`.
    """
    for name, info in model.model_fields.items():
        yield from _of(info.annotation, (*path, name), info)


def _of(
    kind: Any, path: tuple[str, ...], info: FieldInfo
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    inner = [part for part in get_args(kind) if part is not type(None)]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _numbers(kind, path)
    elif kind in (int, float):
        yield path, info
    elif get_origin(kind) is dict:
        yield from (
            _of(inner[1], (*path, "us-east" if path[-1] == "regions" else "solver"), info)
            if inner[1] is not Any
            else ()
        )
    elif get_origin(kind) not in (list, tuple):
        for part in inner:
            yield from _of(part, path, info)


LOSS = "policies.solver.train.loss"
ADAPTER = "policies.solver.train.adapter"
OPTIMIZER = "policies.solver.train.optimizer"
SELECTED: dict[str, dict[str, Any]] = {
    **{f"{LOSS}.{key}": {f"{LOSS}.name": "ppo_clip"} for key in ("clip_low", "clip_high")},
    **{
        f"{section}.prompts.window.bytes_max": {f"{section}.prompts.window.files": ["a.jsonl"]}
        for section in ("data", "evaluation")
    },
    "data.task_runner.workers": {"data.task_runner.name": "processes"},
    **{
        f"{LOSS}.correction.{key}": {f"{LOSS}.correction.name": name}
        for key, name in (
            ("cap", "tis_token"),
            ("low", "icepop"),
            ("high", "icepop"),
            ("limit", "rejection"),
        )
    },
    **{f"{ADAPTER}.{key}": {f"{ADAPTER}.name": "lora"} for key in ("rank", "alpha")},
    **{f"{OPTIMIZER}.{key}": {f"{OPTIMIZER}.name": "muon"} for key in ("momentum", "ns_steps")},
    **{f"gate.test.{key}": {"gate.test.name": "paired_bootstrap"} for key in ("resamples", "seed")},
    **{
        f"gate.datasets.solver.{key}": {"gate.datasets.solver.builtin": "chained_addition"}
        for key in ("limit", "seed")
    },
}
"""Key → what selects the variant that has it, where that is not the default."""
NUMBERS = {".".join(path): info for path, info in _numbers(RunConfig)}


def test_the_numbers_of_every_package_are_listed() -> None:
    some = {
        "steps",
        "data.max_staleness",
        "policies.solver.train.lr",
        "rollout.regions.us-east.workers",
        "evaluation.every",
    }
    assert some <= NUMBERS.keys()
    assert len(NUMBERS) > 60


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_bounds_is_refused_with_key_value_and_bound(
    key: str,
) -> None:
    result = NUMBERS[key]
    bounds = _bounds(result)
    assert any(hasattr(item, "ge") or hasattr(item, "gt") for item in bounds), "no lower bound"
    assert any(hasattr(item, "le") or hasattr(item, "lt") for item in bounds), "no upper bound"
    for written in (*NOT_FINITE, *TOO_FAR):
        with pytest.raises(ConfigError) as caught:
            load(RECIPE, {**SELECTED.get(key, {}), key: _value(written)})
        assert key in str(caught.value)
        assert re.search(
            r"must be (a finite number|(less|greater) than (or equal to )?[-\d.e+]+), not ",
            str(caught.value),
        )


def _bounds(info: FieldInfo) -> list[Any]:
    """Constraints of the field itself, or of the type within an optional one."""
    inside = [part for part in get_args(info.annotation) if part is not type(None)]
    nested = [
        item
        for part in inside
        for annotated in getattr(part, "__metadata__", ())
        for item in getattr(annotated, "metadata", ())
    ]
    return [*info.metadata, *nested]


def _value(written: str) -> Any:
    from tasks.recipes.yaml_file import read

    return read(written, "a value").value


@pytest.mark.parametrize("key", ["policies.solver.sampling.temperature", "evaluation.temperature"])
def test_a_temperature_too_small_for_float32_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: must be 0 \(greedy\), or at least 1e-12"):
        load(RECIPE, {key: 9e-13})
    assert (
        load(RECIPE, {"policies.solver.sampling.temperature": 1e-12})
        .policies["solver"]
        .sampling.temperature
        == 1e-12
    )


def test_an_error_names_file_line_value_and_bound() -> None:
    with pytest.raises(ConfigError) as caught:
        load(RECIPE.replace("steps: 4", "steps: 1e30"))
    assert (
        str(caught.value)
        == "recipe, line 1: steps: must be less than or equal to 1000000, not 1e+30"
    )
    with pytest.raises(ConfigError) as caught:
        load(RECIPE + "seed: .inf\n")
    assert str(caught.value) == "recipe, line 8: seed: must be a finite number, not inf"
    with pytest.raises(ConfigError) as caught:
        load(RECIPE, {"policies.solver.train.betas": [0.9, float("nan")]})
    assert (
        str(caught.value)
        == "--set policies.solver.train.betas: policies.solver.train.betas.1: must be a finite number, not nan"
    )


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("Steps", 1, 10**6), ("Count", 1, 10**6), ("CountOrNone", 0, 10**6), ("Rows", 1, 10**9), ("Tokens", 1, 10**8),
        ("TokensOrNone", 0, 10**8), ("Width", 2, 2**16), ("Layers", 1, 2**10), ("Threads", 1, 2**10),
        ("Megabytes", 64, 2**24), ("Bytes", 1, 2**40), ("Seed", 0, 2**63 - 1),
        ("Attempts", 1, 9_999), ("RowsOrNone", 0, 10**9), ("Context", 2, 10**8), ("Devices", 1, 64),
    ],
)  # fmt: skip
def test_integers_are_accepted_from_the_lowest_to_the_highest(
    name: str, least: int, most: int
) -> None:
    kind: TypeAdapter[int] = TypeAdapter(getattr(config_model, name))
    assert [kind.validate_python(value) for value in (least, most)] == [least, most]
    for value in (least - 1, most + 1, True, False):
        with pytest.raises(ValidationError):
            kind.validate_python(value)


THIRTY_DAYS_S = 30 * 24 * 3600.0


@pytest.mark.parametrize(
    ("name", "least", "least_is_taken", "most", "most_is_taken"),
    [
        ("Seconds", 0.001, True, THIRTY_DAYS_S, True), ("SecondsOrNone", 0.0, True, THIRTY_DAYS_S, True),
        ("Positive", 0.0, False, 1e12, True), ("NotNegative", 0.0, True, 1e12, True), ("AnySign", -1e12, True, 1e12, True),
        ("Share", 0.0, False, 1.0, True), ("Decay", 0.0, True, 1.0, False),
        ("Hours", 0.0, False, 10 * 365 * 24.0, True), ("RatioLimit", 1.0, False, 1e6, True), ("ShareOrNone", 0.0, True, 1.0, True),
    ],
)  # fmt: skip
def test_numbers_are_accepted_up_to_their_bounds(
    name: str, least: float, least_is_taken: bool, most: float, most_is_taken: bool
) -> None:
    kind: TypeAdapter[float] = TypeAdapter(getattr(config_model, name))
    inside = [math.nextafter(least, math.inf), math.nextafter(most, -math.inf)]
    taken = inside + [least] * least_is_taken + [most] * most_is_taken
    assert [kind.validate_python(value) for value in taken] == taken
    refused = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), True]
    for value in refused + [least] * (not least_is_taken) + [most] * (not most_is_taken):
        with pytest.raises(ValidationError):
            kind.validate_python(value)


@pytest.mark.parametrize(
    ("key", "least", "most"), [("steps", 1, 1_000_000), ("data.max_staleness", 0, 1_000_000)]
)
def test_the_bounds_themselves_are_allowed(key: str, least: int, most: int) -> None:
    for value in (least, most):
        assert reduce(getattr, key.split("."), load(RECIPE, {key: value})) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ConfigError, match=f"{key}: must be"):
            load(RECIPE, {key: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "policies.solver.train.grad_clip",
            float("inf"),
            "must be a finite number, not inf; null means no limit",
        ),
        (
            "policies.solver.train.grad_clip",
            0,
            "must be greater than 0, not 0; null means no limit",
        ),
        (
            "policies.solver.train.loss.dual_clip",
            float("inf"),
            "must be a finite number, not inf; null means no limit",
        ),
        ("policies.solver.train.lr", float("inf"), "must be a finite number, not inf"),
        ("policies.solver.train.lr", -1, "must be greater than or equal to 0, not -1"),
    ],
)
def test_the_error_of_an_optional_limit_shows_how_to_disable_it(
    key: str, value: float, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RECIPE, {key: value})
    assert str(caught.value) == f"--set {key}: {words}"


def test_gpus_that_a_section_names_often_are_compared_in_proportion_to_their_number() -> None:
    """A run.json of a megabyte may name half a million, which took a command minutes."""
    num_compared = 0

    class Gpu(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return int(self) == other

    gpus = tuple(Gpu(number % 500) for number in range(1000))
    with pytest.raises(ValueError, match="names GPU 0 twice; name each GPU once"):
        config_model._check_distinct(gpus)
    assert num_compared < 3 * len(gpus)
