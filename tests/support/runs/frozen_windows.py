"""Frozen rows of a data window, without the files they are from."""

from storage import layout
from storage.records.rollouts import Prompt
from storage.records.windows import PromptWindow, WindowFile
from storage.run import prompt_windows
from storage.store.object_store import ObjectStore

FILE = WindowFile(
    name="s3://bucket/feedback/1.jsonl",
    num_bytes=812,
    modified_s=1_793_491_200.0,
    digest=f"sha256:{'a1' * 32}",
    rows=4,
)


def frozen_window(store: ObjectStore, run_id: str, prompts: list[Prompt]) -> PromptWindow:
    """Store the rows in a run, which need not exist; return what its `run.json` has to name."""
    run = store.sub(layout.run_prefix(run_id))
    return PromptWindow(
        since_s=1_793_491_200.0,
        until_s=1_793_577_600.0,
        date_column=None,
        files=(FILE,),
        rows=len(prompts),
        digest=prompt_windows.create(run, prompts),
    )
