"""A class that a recipe names is resolved and checked before it is called."""

import abc
import functools
import sys
from asyncio import CancelledError
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from data_ops import algorithms
from data_ops.algorithms import custom, protocols
from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.samplers import Edf, Fifo
from data_ops.prompts.custom import CustomPrompts
from rollout import workflows
from rollout.config import EngineConfig, WorkflowConfig
from rollout.engines import engine as rollout_engine
from rollout.rewards import math_reward, reward
from storage import import_path
from storage.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientError,
)
from storage.import_path import (
    ALLOW_VARIABLE,
    PluginKind,
    check_name,
    construct,
    foreign_code,
    resolve,
)
from trainer.config import TrainConfig
from trainer.engines import engine as train_engine
from trainer.losses.custom import CustomLoss

CALLED: list[str] = []
"""What was called that only should have been looked at."""
HERE = __name__


class Chooses(Protocol):
    size: int

    def choose(self, rows: list[int], count: int) -> list[int]: ...

    async def close(self) -> None: ...


class Greedy:
    def __init__(self, seed: int, depth: int = 1) -> None:
        CALLED.append("Greedy")

    def choose(self, rows: list[int], count: int) -> list[int]:
        return rows[:count]

    async def close(self) -> None: ...


class Lenient(Greedy):
    @staticmethod
    def choose(*anything: Any) -> list[int]:  # type: ignore[override]
        return []


class Deaf(Greedy):
    def choose(self, rows: list[int]) -> list[int]:  # type: ignore[override]
        return rows


class Hasty(Greedy):
    def close(self) -> None: ...  # type: ignore[override]


class Slow(Greedy):
    async def choose(self, rows: list[int], count: int) -> list[int]:  # type: ignore[override]
        return rows[:count]


class Trickling(Greedy):
    def choose(self, rows: list[int], count: int) -> Iterator[int]:  # type: ignore[override]
        yield from rows[:count]


class TricklingSlowly(Greedy):
    async def choose(self, rows: list[int], count: int) -> AsyncIterator[int]:  # type: ignore[override]
        yield rows[0]


class SlowClass(Greedy):
    @classmethod
    async def choose(cls, rows: list[int], count: int) -> list[int]:  # type: ignore[override]
        return rows[:count]


def noted(method: Any) -> Any:
    @functools.wraps(method)
    def called(*args: Any) -> Any:
        return method(*args)

    return called


class Decorated(Greedy):
    @noted
    async def close(self) -> None: ...


class WithoutSeed(Greedy):
    def __init__(self) -> None:
        CALLED.append("WithoutSeed")


class Half:
    def choose(self, rows: list[int], count: int) -> list[int]:
        return rows


class Abstract(Greedy, abc.ABC):
    @abc.abstractmethod
    def choose(self, rows: list[int], count: int) -> list[int]: ...


class Attribute(Greedy):
    choose = 3  # type: ignore[assignment]


class Unfriendly(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        CALLED.append("metaclass")


class Made(metaclass=Unfriendly):
    pass


def function(*args: Any, **kwargs: Any) -> None:
    CALLED.append("function")


instance = Half()
KIND = PluginKind("chooser", Chooses, "docs/choosers.md", constructor_args=("seed",))
WANTED = r"a chooser is a class with choose\(rows, count\) and close\(\) \(docs/choosers\.md\)"
TABLE: dict[str, type | str] = {"greedy": Greedy, "late": f"{HERE}:Lenient"}


@pytest.fixture(autouse=True)
def nothing_is_called() -> Any:
    CALLED.clear()
    yield
    assert CALLED == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("greedy", Greedy), ("late", Lenient)),
        *((f"{HERE}:{item.__name__}", item) for item in (Greedy, Lenient, Decorated)),
    ],
)
def test_a_builtin_name_and_an_import_path_resolve_to_a_class_without_calling_it(
    name: str, found: type
) -> None:
    assert resolve(name, TABLE, KIND) is found


def test_an_unknown_name_gives_a_list_of_names() -> None:
    with pytest.raises(
        ConfigError, match=r"^'gredy' is not known; use one of greedy, late, or an import path"
    ):
        resolve("gredy", TABLE, KIND)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "no_such_package:Name",
            "no_such_package:Name cannot be imported: No module named 'no_such_package'",
        ),
        (f"{HERE}:NoSuch", f"the module {HERE} has no 'NoSuch'"),
        (":Name", "is not an import path"),
        ("package:", "is not an import path"),
        (".relative:Name", "is not an import path"),
        ("package.__main__:Name", "no part begins with an underscore"),
        ("package:_Name", "no part begins with an underscore"),
        ("package:a.b", "is not an import path"),
        ("a\n:B", "is not an import path"),
    ],
)
def test_the_error_of_an_import_path_names_the_part_that_failed(path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(path, TABLE, KIND)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("function", "is a function and no class"),
        ("instance", "is a Half and no class"),
        ("np", "is a module and no class"),
        ("TABLE", "is a dict and no class"),
        ("Half", "has no close"),
        ("Made", "has no choose and no close"),
        ("Attribute", "has no choose"),
        ("Deaf", r"has a choose that does not take \(rows, count\)"),
        ("Hasty", "has a close that cannot be awaited: write async def close"),
        ("Slow", "has a choose that would have to be awaited: write def choose without async"),
        ("SlowClass", "has a choose that would have to be awaited: write def choose without async"),
        ("Trickling", "has a choose that is a generator: return the result"),
        (
            "TricklingSlowly",
            "has a choose that would have to be awaited: write def choose without async",
        ),
        ("Abstract", "is abstract"),
        ("Chooses", "is abstract"),
        ("WithoutSeed", r"cannot be built as WithoutSeed\(seed\)"),
    ],
)
def test_an_object_of_another_kind_is_named_with_its_key_and_the_expected_kind(
    name: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.choose: {HERE}:{name} {what}; {WANTED}$"):
        resolve(f"{HERE}:{name}", TABLE, KIND, "data.choose")


@pytest.mark.parametrize(
    "path",
    ["os:system", "subprocess:Popen", "builtins:eval", "antigravity:x", "collections.abc:Sized"],
)
def test_the_standard_library_is_refused_before_it_is_imported(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_path, "_load", function)
    with pytest.raises(ConfigError, match=f"^{path} is part of Python's standard library"):
        resolve(path, TABLE, KIND)
    with pytest.raises(ConfigError, match="is part of Python's standard library"):
        check_name(path, TABLE)


@pytest.mark.parametrize(
    ("allowed", "path", "is_allowed"),
    [
        ("tests", f"{HERE}:Greedy", True),
        (f"other, {HERE}", f"{HERE}:Greedy", True),
        ("tests.unit", f"{HERE}:Greedy", True),
        ("test", f"{HERE}:Greedy", False),
        (f"{HERE}:Greedy", f"{HERE}:Greedy", False),
        ("other", f"{HERE}:Greedy", False),
        ("", f"{HERE}:Greedy", False),
        (" , ", f"{HERE}:Greedy", False),
        ("", "greedy", True),
        ("", "late", True),
        ("os", "os:system", False),
    ],
)
def test_the_allow_list_applies_to_import_paths_and_not_to_builtins(
    allowed: str, path: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, allowed)
    if is_allowed:
        check_name(path, TABLE)
        assert resolve(path, TABLE, KIND) in (Greedy, Lenient)
        return
    with pytest.raises(
        ConfigError, match=r"is not imported: ASTRAFLOW_IMPORT_ALLOW allows|standard library"
    ):
        resolve(path, TABLE, KIND)
    with pytest.raises(
        ConfigError, match=r"is not imported: ASTRAFLOW_IMPORT_ALLOW allows|standard library"
    ):
        check_name(path, TABLE)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import sys; sys.exit(3)", "its module raised SystemExit: 3"),
        ("raise RuntimeError('no GPU')", "its module raised RuntimeError: no GPU"),
        ("def broken(:", "its module raised SyntaxError"),
        (
            "import no_such_dependency",
            "No module named 'no_such_dependency'; is its package installed",
        ),
        (
            "from os import no_such_name",
            "its module raised ImportError: cannot import name 'no_such_name'",
        ),
    ],
)
def test_a_module_that_raises_is_a_config_error(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        resolve("failing_module:Name", TABLE, KIND)
    assert "failing_module" not in sys.modules


def test_a_module_that_raises_for_an_attribute_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_module.py").write_text(
        "def __getattr__(name): raise ImportError(f'{name} needs torchvision')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^lazy_module:Name cannot be imported: .* ImportError: Name needs torchvision$",
    ):
        resolve("lazy_module:Name", TABLE, KIND)
    sys.modules.pop("lazy_module", None)


class _NeedsBackend(type):
    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise ImportError(f"{name} needs torchvision")


class Placeholder(metaclass=_NeedsBackend):
    """The placeholder that a package such as transformers has for a class with missing
    requirements.
    """


def test_a_class_whose_attributes_raise_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r":Placeholder cannot be used: it raised ImportError: \w+ needs torchvision$",
    ):
        resolve(f"{__name__}:Placeholder", TABLE, KIND)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("detail")


@pytest.mark.parametrize(
    ("raised", "described"),
    [
        (KeyError("oops"), "KeyError: 'oops'"),
        (ValueError("turns must be 3"), "turns must be 3"),
        (FileNotFoundError("no tests.json"), "FileNotFoundError: no tests.json"),
        (StopIteration(3), "StopIteration: 3"),
        (SystemExit(0), "SystemExit: 0"),
        (CancelledError(), "CancelledError: "),
        (ConflictError("first"), "ConflictError: first"),
        (NotFoundError("my file"), "NotFoundError: my file"),
        (CorruptError("my file"), "CorruptError: my file"),
        (
            UnreadableError(),
            "UnreadableError: its message cannot be read: __str__ raised AttributeError",
        ),
    ],
)
def test_an_error_of_foreign_code_is_a_config_error_with_its_cause(
    raised: BaseException, described: str
) -> None:
    with (
        pytest.raises(
            ConfigError, match=f"^data.filter: keep of Long failed: {described}$"
        ) as found,
        foreign_code("data.filter: keep of Long"),
    ):
        raise raised
    assert found.value.__cause__ is raised


RESTARTED = [
    TransientError("lost"),
    ConnectionResetError("reset"),
    TimeoutError(),
    MemoryError(),
    EOFError(),
]


@pytest.mark.parametrize("raised", [ConfigError("use a smaller one"), *RESTARTED])
def test_an_error_that_a_restart_may_mend_is_raised_as_it_is(raised: Exception) -> None:
    with pytest.raises(type(raised)) as found, foreign_code("data.filter", EOFError):
        raise raised
    assert found.value is raised


@pytest.mark.parametrize("raised", RESTARTED)
def test_an_error_of_a_constructor_that_a_restart_may_mend_is_raised_as_it_is(
    raised: Exception,
) -> None:
    def refuse() -> None:
        raise raised

    with pytest.raises(type(raised)) as found:
        construct(lambda: refuse, "a:B", {}, ("name", "args"), EOFError)
    assert found.value is raised


@pytest.mark.parametrize("raised", [ConflictError("first"), CancelledError(), UnreadableError()])
def test_an_error_of_a_constructor_is_a_config_error(raised: BaseException) -> None:
    def refuse() -> None:
        raise raised

    with pytest.raises(ConfigError, match=rf"^args: a:B refuses {{}}: {type(raised).__name__}: "):
        construct(lambda: refuse, "a:B", {}, ("name", "args"))


PLACES = {
    "curate": lambda name: algorithms.curators([custom.CustomCurator(name=name)]),
    "filter": lambda name: algorithms.filters([custom.CustomFilter(name=name)]),
    "sample": lambda name: algorithms.samplers([custom.CustomSampler(name=name)]),
    "prompts": lambda name: CustomPrompts(custom=name).stream(),
    "loss": lambda name: CustomLoss(path=name).make(),
    "workflow": lambda name: workflows.make_workflow(
        WorkflowConfig(name=name), math_reward.MathReward(1.0)
    ),
    "reward": lambda name: reward.make_reward(name, 1.0),
    "rollout engine": lambda name: rollout_engine.make_engine(EngineConfig(name=name), {}),
    "train engine": lambda name: train_engine.make_engine(TrainConfig(engine=name), {}, 0),
}
KEYS = {
    "curate": r"data\.curate\.0",
    "filter": r"data\.filter\.0",
    "sample": r"data\.sample\.0",
    "prompts": r"prompts\.custom",
    "loss": r"train\.loss\.path",
    "workflow": r"rollout\.workflow\.name",
    "reward": r"rollout\.workflow\.reward",
    "rollout engine": r"rollout\.engine\.name",
    "train engine": r"train\.engine",
}
VERBS = {
    "curate": r"a curator is a class with observe\(order, shard\) and accept\(prompt, draw\) \(docs/extending/data_algorithms\.md\)",
    "filter": r"a filter is a class with keep\(group\) \(docs/extending/data_algorithms\.md\)",
    "sample": r"a sampler is a class with arrange\(draft\) \(docs/extending/data_algorithms\.md\)",
    "prompts": r"a source of prompts is a class with size\(\) and prompt\(index\) \(docs/extending/sources\.md\)",
    "loss": r"a loss is a class with prepare\(logprobs_N, behaviour_N, advantages_N\) and "
    r"token_losses\(prepared, logprobs_N, behaviour_N, advantages_N\) \(docs/extending/losses\.md\)",
    "workflow": r"a workflow is a class with play\(prompt, agents\) \(docs/extending/workflows\.md\)",
    "reward": r"a reward is a class with score\(answer, prompt\) and close\(\) \(docs/extending/workflows\.md\)",
    "rollout engine": r"a rollout engine is a class with capacity\(\), digest\(version\), generate\(tokens, sampling\), "
    r"load\(version, tensors\) and close\(\) \(docs/extending/rollout_engine\.md\)",
    "train engine": r"a train engine is a class with set_weights\(tensors\), step\(batch\), weights\(\), save\(\) and "
    r"load\(tensors, state\) \(docs/extending/train_engine\.md\)",
}


@pytest.mark.parametrize("place", PLACES)
def test_each_key_of_a_recipe_rejects_a_class_of_another_kind_before_calling_it(
    place: str,
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^{KEYS[place]}: {HERE}:function is a function and no class; {VERBS[place]}$",
    ):
        PLACES[place](f"{HERE}:function")
    with pytest.raises(
        ConfigError, match=rf"^{KEYS[place]}: {HERE}:Made has no .*; {VERBS[place]}$"
    ):
        PLACES[place](f"{HERE}:Made")
    with pytest.raises(
        ConfigError, match=rf"^{KEYS[place]}: os:system is part of Python's standard library"
    ):
        PLACES[place]("os:system")


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ({"accept_all": AcceptAll}, protocols.CURATOR),
        ({"zero_advantage": ZeroAdvantage}, protocols.FILTER),
        ({"edf": Edf, "fifo": Fifo}, protocols.SAMPLER),
        (workflows.WORKFLOWS, workflows.WORKFLOW),
        (reward.REWARDS, reward.REWARD),
        (rollout_engine.ENGINES, rollout_engine.ENGINE),
        (train_engine.ENGINES, train_engine.ENGINE),
    ],
)
def test_each_builtin_fulfils_the_contract_of_its_kind(
    table: dict[str, Any], kind: PluginKind
) -> None:
    for name in table:
        result = resolve(name, table, kind)
        assert resolve(f"{result.__module__}:{result.__name__}", {}, kind) is result


class Curator:
    needs_shards = False

    def __init__(self, limit: float = 1.0) -> None:
        CALLED.append("Curator")

    def observe(self, order: object, shard: object) -> None: ...

    def accept(self, prompt: object, draw: np.random.Generator) -> bool:
        return True


def test_arguments_of_an_algorithm_are_validated_without_building_it() -> None:
    custom.CustomCurator(name=f"{HERE}:Curator", args={"limit": 0.5}).find()
    with pytest.raises(
        ConfigError,
        match=r"Curator does not take args \{'depth': 2\} \(got an unexpected keyword argument",
    ):
        custom.CustomCurator(name=f"{HERE}:Curator", args={"depth": 2}).find()


class NoRoles:
    def __init__(self, reward: object) -> None:
        CALLED.append("NoRoles")

    async def play(self, prompt: object, agents: object) -> None: ...


class OneLetterRoles(NoRoles):
    roles = "solver"


@pytest.mark.parametrize("name", ["NoRoles", "OneLetterRoles"])
def test_the_roles_of_a_workflow_class_are_known_before_it_is_built(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^rollout\.workflow\.name: {HERE}:{name} has no class attribute roles"
    ):
        PLACES["workflow"](f"{HERE}:{name}")
