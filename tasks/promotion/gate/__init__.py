"""The gate: is a candidate better than the champion on the same problems with the same seeds?

    outcomes.py           what both achieved, checked      paired_bootstrap.py  the default test
    comparison.py         the contract of a test           mcnemar.py           for right and wrong
    config.py             the settings                     custom.py            by import path
    judgement.py          the rule, and its table

Everything here is pure: arrays and settings in, a verdict out.
"""

from typing import Annotated, Final, TypeAlias

from pydantic import Discriminator, Tag

from storage.config_union import ByPath, variants
from tasks.promotion.gate.custom import CustomGateTest
from tasks.promotion.gate.mcnemar import McNemar
from tasks.promotion.gate.paired_bootstrap import PairedBootstrap

GateTestConfig: TypeAlias = Annotated[
    Annotated[PairedBootstrap, Tag("paired_bootstrap")]
    | Annotated[McNemar, Tag("mcnemar")]
    | Annotated[CustomGateTest, Tag("custom")],
    Discriminator(ByPath()),
]
"""The table of tests: `test: NAME`, or `test: {name: NAME}` with further settings."""

GATE_TESTS: Final = variants(GateTestConfig)
"""`name` → the model of its settings."""
