"""`docs/extending/gate_tests.md`: its example runs, and its table is that of the code."""

import re
from pathlib import Path

import pytest
import yaml

from tasks.promotion.gate import GATE_TESTS
from tasks.promotion.gate.config import GateConfig
from tasks.promotion.gate.judgement import judge
from tasks.promotion.gate.mcnemar import mcnemar_p_value
from tasks.promotion.gate.outcomes import PairedOutcomes
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs" / "extending" / "gate_tests.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(SETTINGS,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


def test_the_example_is_a_test_of_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_gate_tests.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    config = GateConfig.model_validate(yaml.safe_load(SETTINGS)["gate"])
    ids = [str(number) for number in range(60)]
    champion, candidate = (
        [[0.5, 0.5]] * 60,
        [[1.0, 0.5]] * 20 + [[0.0, 0.5]] * 5 + [[0.5, 0.5]] * 35,
    )
    verdict = judge([PairedOutcomes.of("set", ids, champion, candidate)], config)
    assert verdict.passed
    assert verdict.rows[0].p_value == mcnemar_p_value(20, 5)


def test_the_table_lists_every_test_with_its_settings_and_file() -> None:
    rows = re.findall(
        r"^\| (`\w+`|an import path)[^|]*\| ([^|]*)\|[^|]*\| `([\w/.]+)` \|$", PAGE, re.M
    )
    table = {
        name.strip("`"): (set(re.findall(r"`(\w+)`", settings)), file)
        for name, settings, file in rows
    }
    expected = {
        "an import path" if name == "custom" else name: (
            set(model.model_fields) - {"name"},
            f"{model.__module__.replace('.', '/')}.py",
        )
        for name, model in GATE_TESTS.items()
    }
    assert table == expected
