"""Settings that count only where another setting of their section selects them.

    loss: {name: ppo_clip, m2_threshold: 0.02}     `m2_threshold` counts where `name` is m2po, so this is a mistake

A recipe that extends another may select something else than its base: what the base wrote for its own selection is then
dropped (`recipe_source.py`). What one layer writes for a selection that it does not make is refused (`recipe_checks.py`).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

GIVEN: Final = None
"""In place of a value: any but null, 0 and the empty text."""


class Condition(NamedTuple):
    """Example: `Condition(("clip_low", "clip_high"), {"name": "ppo_clip"})`."""

    keys: tuple[str, ...]
    under: Mapping[str, Any]
    """Setting of the same section → the value that selects `keys`; one of them is enough."""

    def holds(self, section: Mapping[str, Any]) -> bool:
        """Whether the settings of a section select `keys`. A setting that is not there selects nothing."""
        return any(section.get(key) == value if value is not GIVEN else section.get(key) for key, value in self.under.items())

    @property
    def words(self) -> str:
        """Examples: `name: ppo_clip`, `path or hub`."""
        return " or ".join(key if value is GIVEN else f"{key}: {value}" for key, value in self.under.items())


ALTERNATIVES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompts": ("builtin", "path", "hub"),
    "model": ("tiny", "path", "hub"),
}
"""Section → keys of which exactly one is set."""
CONDITIONS: Final[Mapping[str, tuple[Condition, ...]]] = {
    "loss": (
        Condition(("clip_low", "clip_high"), {"name": "ppo_clip"}),
        Condition(("m2_form", "m2_threshold"), {"name": "m2po"}),
        Condition(("constant_length",), {"aggregate": "constant"}),
    ),
    "prompts": (
        Condition(("hub_config",), {"hub": GIVEN}),
        Condition(("split",), {"builtin": GIVEN, "hub": GIVEN}),
        Condition(("question", "answer", "answer_after"), {"path": GIVEN, "hub": GIVEN}),
    ),
    "advantage": (Condition(("overlong_max_tokens", "overlong_factor"), {"overlong_tokens": GIVEN}),),
}
"""Section → which of its settings count only under others."""


def overruled(name: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> set[str]:
    """Keys of the section `below` that mean nothing any more once `above` is laid over it, because `above` selects something
    else. Example: `overruled("prompts", {"builtin": "chained_addition", "split": "test"}, {"path": "a.jsonl"})` is
    `{"builtin", "split"}`."""
    alternatives = ALTERNATIVES.get(name, ())
    chosen = [key for key in alternatives if key in above]
    dropped = {key for key in alternatives if chosen and key not in above}
    result = {key: value for key, value in {**below, **above}.items() if key not in dropped}
    for condition in CONDITIONS.get(name, ()):
        if (chosen or set(condition.under) & set(above)) and not condition.holds(result):
            dropped |= set(condition.keys) - set(above)
    return dropped & set(below)


def without_effect(name: str, written: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, str]:
    """Key → why its value has no effect, for the settings that were `written` in a section; `section` has its defaults too.
    Null is no setting."""
    found: dict[str, str] = {}
    for condition in CONDITIONS[name]:
        selectors = ALTERNATIVES.get(name) or tuple(condition.under)
        here = " and ".join(f"{key}: {section[key]}" for key in selectors if section[key] is not None)
        for key in condition.keys:
            if written.get(key) is not None and not condition.holds(section):
                found[key] = f"has no effect with {here}; leave it out, or set {condition.words}"
    return found
