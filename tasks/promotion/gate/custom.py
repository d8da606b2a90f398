"""A gate's test of a user, by import path (`docs/extending/gate_tests.md`)."""

from typing import ClassVar

from data_ops.algorithms.custom import CustomAlgorithm
from storage.import_path import PluginKind
from tasks.promotion.gate.comparison import GATE_TEST, GateTest


class CustomGateTest(CustomAlgorithm):
    """A test by import path."""

    kind: ClassVar[PluginKind] = GATE_TEST

    def make(self, key: str) -> GateTest:
        """Return the test. ConfigError, beginning with `key`, where that is impossible."""
        test: GateTest = self.build(key)
        return test
