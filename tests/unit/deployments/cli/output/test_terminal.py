import json
import math

import pytest

from deployments.cli.output import terminal


def test_numbers_that_are_not_finite_are_null_in_all_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = {"fields": {"x": [math.nan, {"y": -math.inf}], "z": 2**127, "s": "\ud800"}, "n": 1.5}
    terminal.show(content, as_json=True)
    written = capsys.readouterr().out
    assert "NaN" not in written
    assert json.loads(written) == {
        "fields": {"x": [None, {"y": None}], "z": 2**127, "s": "\ud800"},
        "n": 1.5,
    }
