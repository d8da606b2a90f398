import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.coordination import rounds
from storage.errors import ConflictError, CorruptError
from storage.formats.json_objects import seal
from storage.records.control import Round, RoundEntry
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore, open_store

VALUE = b"\x00address"


@pytest.fixture
def run(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path)).sub("runs/r")


def test_rounds_are_numbered_from_one_and_each_ends_the_one_before(run: ObjectStore) -> None:
    assert rounds.read_open(run, "solver") is None
    first = rounds.open_next(run, "solver")
    assert (first.number, rounds.newest_number(run, "solver")) == (1, 1)
    assert rounds.read_open(run, "solver") == first
    assert not rounds.is_over(run, first)
    second = rounds.open_next(run, "solver")
    assert second.number == 2
    assert rounds.is_over(run, first)
    assert not rounds.is_over(run, second)
    assert rounds.read_open(run, "solver") == second
    assert rounds.read_open(run, "verifier") is None


def test_a_round_that_was_ended_cannot_be_joined_and_the_next_can(run: ObjectStore) -> None:
    first = rounds.open_next(run, "solver")
    rounds.end(run, first)
    rounds.end(run, first)
    assert rounds.is_over(run, first)
    assert rounds.read_open(run, "solver") is None
    assert rounds.newest_number(run, "solver") == 2
    third = rounds.open_next(run, "solver")
    rounds.end(run, first)
    assert rounds.read_open(run, "solver") == third


class FasterLeader:
    """A backend in which another leader opens the first `wins` rounds just before this one."""

    def __init__(self, backend: Backend, wins: int) -> None:
        self._backend, self._wins = backend, wins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create(self, key: str, body: bytes) -> bool:
        if self._wins:
            self._wins -= 1
            number = int(key.rpartition("/")[2].removesuffix(".json"))
            self._backend.create(key, seal(Round(policy="solver", number=number, is_open=True)))
        return self._backend.create(key, body)


def test_two_leaders_never_have_one_round(run: ObjectStore) -> None:
    slower = replace(run, backend=FasterLeader(run.backend, wins=2))
    assert rounds.open_next(slower, "solver").number == 3
    assert rounds.newest_number(run, "solver") == 3


def test_an_entry_is_created_once_and_belongs_to_its_round(run: ObjectStore) -> None:
    first = rounds.open_next(run, "solver")
    assert rounds.read_entry(run, first, "0//cpu//0/1") is None
    rounds.write_entry(run, first, "0//cpu//0/1", VALUE)
    assert rounds.read_entry(run, first, "0//cpu//0/1") == VALUE
    with pytest.raises(ConflictError):
        rounds.write_entry(run, first, "0//cpu//0/1", VALUE)
    second = rounds.open_next(run, "solver")
    assert rounds.read_entry(run, second, "0//cpu//0/1") is None
    rounds.write_entry(run, second, "0//cpu//0/1", b"other")
    assert rounds.read_entry(run, second, "0//cpu//0/1") == b"other"


def test_entries_of_older_rounds_are_deleted_and_the_rounds_kept(run: ObjectStore) -> None:
    for number in range(3):
        rounds.write_entry(run, rounds.open_next(run, "solver"), f"of {number}", VALUE)
    newest = rounds.read_open(run, "solver")
    assert newest is not None
    entry = rounds.entry_key(newest, "of 2")
    starts = [layout.round_start("solver", number) for number in (1, 2, 3)]
    assert sorted(run.list(layout.rounds("solver"))) == sorted([*starts, entry])


def test_the_entry_of_a_node_that_joins_while_older_entries_are_deleted_is_kept(
    run: ObjectStore,
) -> None:
    rounds.write_entry(run, rounds.open_next(run, "solver"), "node/1", VALUE)
    second = Round(policy="solver", number=2, is_open=True)
    rounds.write_entry(run, second, "node/1", VALUE)
    assert rounds.open_next(run, "solver") == second
    assert rounds.read_entry(run, second, "node/1") == VALUE


def test_an_unreadable_round_counts_as_over(run: ObjectStore) -> None:
    run.create(layout.round_start("solver", 1), b"{")
    assert rounds.read_open(run, "solver") is None
    other = seal(Round(policy="solver", number=7, is_open=True))
    run.create(layout.round_start("solver", 2), other)
    assert rounds.read_open(run, "solver") is None
    assert rounds.open_next(run, "solver").number == 3


def test_a_damaged_entry_is_refused(run: ObjectStore) -> None:
    opened = rounds.open_next(run, "solver")

    def store(name: str, entry: RoundEntry) -> None:
        run.create(rounds.entry_key(opened, name), seal(entry))

    store("a", RoundEntry(name="b", value=""))
    store("c", RoundEntry(name="c", value="zz"))
    store("d", RoundEntry(name="d", value="00" * (rounds.VALUE_BYTES_MAX + 1)))
    for name, fault in (("a", "holds the entry 'b'"), ("c", "not hexadecimal"), ("d", "at most")):
        with pytest.raises(CorruptError, match=fault):
            rounds.read_entry(run, opened, name)
    with pytest.raises(ValueError, match="at most 65,536"):
        rounds.write_entry(run, opened, "e", bytes(rounds.VALUE_BYTES_MAX + 1))
    rounds.write_entry(run, opened, "e", bytes(rounds.VALUE_BYTES_MAX))
    assert len(rounds.read_entry(run, opened, "e") or b"") == rounds.VALUE_BYTES_MAX


def test_a_series_without_an_end_is_refused(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ROUNDS_MAX", 2)
    for _ in range(2):
        rounds.open_next(run, "solver")
    with pytest.raises(CorruptError, match="solver has more than 2 rounds"):
        rounds.open_next(run, "solver")


def test_a_round_is_stored_as_the_format_says(run: ObjectStore) -> None:
    rounds.open_next(run, "solver")
    stored = json.loads(run.get("rounds/solver/00000001.json"))
    assert {name: stored[name] for name in ("policy", "number", "is_open")} == {
        "policy": "solver",
        "number": 1,
        "is_open": True,
    }
