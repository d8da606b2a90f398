from dataclasses import replace

import pytest

from storage import layout
from storage.formats.json_objects import seal
from storage.records.rollouts import Order, Prompt
from storage.run import orders, runs
from storage.run.prompt_windows import FrozenPrompts
from storage.store.object_store import ObjectStore
from storage.verify.frozen_prompts import PromptAudit
from storage.verify.verify import Violation, verify
from storage.verify.violations import Findings
from tasks.recipes.run_terms import run_terms
from tests.support.runs.dataflow_world import World, world
from tests.support.runs.frozen_windows import frozen_window

WINDOW = {"window": {"files": ["/absent/*.jsonl"]}}
PROMPTS = [Prompt(f"a.jsonl/{n}", {"question": f"{n}?", "answer": str(n)}) for n in range(5)]


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """A finished run with a frozen window, all of whose files are away."""
    simulation: World = world(memory_store, frozen=PROMPTS, prompts=WINDOW)
    simulation.finish(simulation.dataflow())
    simulation.check()
    used = {prompt.id: prompt for order in simulation.orders() for prompt in order.prompts}
    assert used == {prompt.id: prompt for prompt in PROMPTS}
    return simulation.run


def violations(run: ObjectStore) -> list[Violation]:
    return list(verify(run, run_terms(run)).violations)


def key(run: ObjectStore) -> str:
    return layout.prompts(runs.read_run(run).windows["data.prompts"].digest)


def replace_prompts(run: ObjectStore, number: int, *prompts: Prompt) -> None:
    order = replace(orders.read(run, number), prompts=prompts)
    run.put(layout.order(number), seal(order))


def test_missing_rows_are_a_violation_and_named_once(run: ObjectStore) -> None:
    run.delete(key(run))
    (found,) = violations(run)
    assert (found.invariant, found.where) == (3, key(run))
    assert found.what.startswith("the rows of data.prompts cannot be read: ")
    assert "is missing" in found.what


def test_damaged_rows_are_a_violation(run: ObjectStore) -> None:
    body = run.get(key(run))
    run.put(key(run), body[:-20] + bytes([body[-20] ^ 1]) + body[-19:])
    (found,) = violations(run)
    assert (found.invariant, found.where) == (3, key(run))
    assert "does not have the digest" in found.what


@pytest.mark.parametrize(
    "strange",
    [
        Prompt("a.jsonl/9", {"question": "9?", "answer": "9"}),
        Prompt("a.jsonl/1", {"question": "1?", "answer": "7"}),
    ],
)
def test_an_order_with_another_prompt_is_a_violation(run: ObjectStore, strange: Prompt) -> None:
    order = orders.read(run, 1)
    replace_prompts(run, 1, order.prompts[0], strange)
    found = [each for each in violations(run) if each.invariant == 3]
    what = f"has the prompt {strange.id!r}, which is no row of {key(run)}"
    assert [(each.where, each.what) for each in found] == [(layout.order(1), what)]


def test_two_rows_with_one_id_are_a_violation(memory_store: ObjectStore) -> None:
    simulation = world(memory_store, frozen=[PROMPTS[0], PROMPTS[1], PROMPTS[0]], prompts=WINDOW)
    (found,) = violations(simulation.run)
    assert (found.invariant, found.where) == (3, key(simulation.run))
    assert found.what == "has two rows with one id"


def test_orders_are_compared_with_the_rows_for_training_only(memory_store: ObjectStore) -> None:
    terms = run_terms(world(memory_store).run)
    simulation = world(memory_store.sub("other"))
    simulation.dataflow().round()
    window = frozen_window(memory_store.sub("other"), "r", PROMPTS)
    assert orders.next_number(simulation.run) > 0
    with_window = replace(terms, windows={"evaluation.prompts": window})
    assert verify(simulation.run, with_window).violations == ()
    with_window = replace(terms, windows={"data.prompts": window})
    assert {each.invariant for each in verify(simulation.run, with_window).violations} == {3}


def test_a_row_that_is_much_longer_than_the_prompts_of_orders_is_not_parsed(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Prompt("long", {"question": "x" * 10_000}), Prompt("short", {"question": "x" * 50})]
    window, findings = frozen_window(memory_store, "r", rows), Findings()
    audit = PromptAudit(memory_store.sub("runs/r"), {"data.prompts": window}, findings)
    parsed: list[int] = []
    prompt_of = FrozenPrompts.prompt

    def counted(frozen: FrozenPrompts, index: int) -> Prompt:
        parsed.append(index)
        return prompt_of(frozen, index)

    monkeypatch.setattr(FrozenPrompts, "prompt", counted)
    named = (Prompt("long", {"question": "x"}), *rows, Prompt("short", {"question": "y"}))
    audit.check(Order(number=0, prompts=named, samples_per_prompt=1, seed=0, seen=(), cursor={}))
    assert parsed == [0, 1, 1]
    assert [each.what.partition(",")[0] for each in findings.violations()] == [
        "has the prompt 'long'",
        "has the prompt 'short'",
    ]
