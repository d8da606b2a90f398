"""Audit of the frozen rows of data windows: each can be read, and orders have no other prompts."""

from collections.abc import Mapping

from storage import layout
from storage.errors import CorruptError
from storage.formats.json_objects import dump
from storage.records.rollouts import Order, Prompt
from storage.records.windows import PromptWindow
from storage.run import prompt_windows
from storage.run.prompt_windows import FrozenPrompts
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings, Invariant

TRAINING = "data.prompts"
"""The place whose prompts orders have."""
LENGTH_RATIO_MAX = 6
"""A row whose text is longer than this multiple of a prompt's is another one, and is not parsed: an
order may name a row of megabytes many times. As much longer is a text whose characters are escaped.
"""


class PromptAudit:
    """Audit of the frozen rows of a run, and of the prompts of its orders."""

    def __init__(
        self, run: ObjectStore, windows: Mapping[str, PromptWindow], findings: Findings
    ) -> None:
        """Read the frozen rows. One that cannot be read is a violation."""
        self._findings = findings
        self._positions: dict[str, int] = {}
        self._frozen: FrozenPrompts | None = None
        for place, window in windows.items():
            try:
                frozen = prompt_windows.read(run, window)
            except CorruptError as error:
                findings.add(
                    Invariant.LINEAGE,
                    layout.prompts(window.digest),
                    f"the rows of {place} cannot be read: {error}",
                )
                continue
            if place == TRAINING:
                self._frozen = frozen
                self._positions = {each: index for index, each in enumerate(frozen.ids)}
            if len(set(frozen.ids)) < len(frozen.ids):
                findings.add(Invariant.LINEAGE, frozen.key, "has two rows with one id")

    def check(self, order: Order) -> None:
        """Check that the prompts of an order are frozen rows, where the run has a window."""
        if self._frozen is None:
            return
        for prompt in order.prompts:
            if not self._is_row(self._frozen, prompt):
                self._findings.add(
                    Invariant.LINEAGE,
                    layout.order(order.number),
                    f"has the prompt {prompt.id!r}, which is no row of {self._frozen.key}",
                )

    def _is_row(self, frozen: FrozenPrompts, prompt: Prompt) -> bool:
        position = self._positions.get(prompt.id)
        if position is None:
            return False
        if len(frozen.fields[position]) > LENGTH_RATIO_MAX * len(dump(prompt.fields)):
            return False
        try:
            return frozen.prompt(position) == prompt
        except CorruptError:  # the row has no JSON object
            return False
