import pytest

from storage.errors import ConfigError
from storage.naming import resolve


class Greedy:
    pass


TABLE: dict[str, type | str] = {"greedy": Greedy, "counter": "collections:Counter"}


def test_a_builtin_is_found_by_its_name() -> None:
    assert resolve("greedy", TABLE) is Greedy


def test_a_builtin_named_by_path_is_imported_when_it_is_asked_for() -> None:
    from collections import Counter

    assert resolve("counter", TABLE) is Counter


def test_an_import_path_needs_no_table() -> None:
    from collections import OrderedDict

    assert resolve("collections:OrderedDict", {}) is OrderedDict


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gredy' is not known; use one of counter, greedy, or an import path"):
        resolve("gredy", TABLE)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_package:Name", "cannot be imported: No module named 'no_such_package'"),
        ("collections:NoSuch", "the module collections has no 'NoSuch'"),
        (":Name", "is not an import path"),
        ("collections:", "is not an import path"),
        (".relative:Name", "is not an import path"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_broke(path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(path, {})
