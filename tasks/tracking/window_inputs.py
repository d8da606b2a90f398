"""The data windows of a run as dataset inputs of its MLflow run: bounds, files, and digest.

MLflow's page of a run then shows which rows it was trained and evaluated on. The source of a
dataset is the frozen object in the run's store.
"""

import json
from datetime import UTC, datetime
from typing import Any

from storage import layout
from storage.records.windows import PromptWindow
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.tracking.mlflow_client import DatasetInput

NAME_MAX = 500
"""MLflow's limit of a dataset's name and of its context, each."""
DIGITS_MAX = 36
"""Hex digits of the digest that MLflow stores; the source has all of them."""
SOURCE_CHARACTERS_MAX = 60_000
"""MLflow's limit is 65,535; of many files the source names the first ones."""
COLUMN_CHARACTERS_MAX = 100
CONTEXTS = {"data.prompts": "training", "evaluation.prompts": "evaluation"}
"""Place in the recipe → MLflow's word for its use."""


def dataset_inputs(run: ObjectStore) -> list[DatasetInput]:
    """Return the run's data windows, as `run.json` names them; empty for a run without one.

    Raises what `runs.read_run` raises.
    """
    windows = runs.read_run(run).windows
    return [_dataset_input(run, place, window) for place, window in windows.items()]


def _dataset_input(run: ObjectStore, place: str, window: PromptWindow) -> DatasetInput:
    bounds = {"since": _shown(window.since_s), "until": _shown(window.until_s)}
    return DatasetInput(
        name=place[:NAME_MAX],
        digest=window.digest.removeprefix("sha256:")[:DIGITS_MAX],
        source_type="s3" if run.url.startswith("s3://") else "local",
        source=_source(run, window, bounds),
        profile=json.dumps({"num_rows": window.rows, "num_files": len(window.files)}),
        tags={"mlflow.data.context": CONTEXTS.get(place, place[:NAME_MAX])}
        | {f"astraflow.{name}": time for name, time in bounds.items() if time},
    )


def _source(run: ObjectStore, window: PromptWindow, bounds: dict[str, str]) -> str:
    fields: dict[str, Any] = {
        "uri": f"{run.url}/{layout.prompts(window.digest)}",
        "digest": window.digest,
        **bounds,
        "date_column": window.date_column and window.date_column[:COLUMN_CHARACTERS_MAX],
        "files": [file.name for file in window.files],
    }
    while len(text := json.dumps(fields)) > SOURCE_CHARACTERS_MAX:
        fields["files"] = fields["files"][: len(fields["files"]) // 2]
    return text


def _shown(time_s: float | None) -> str:
    return "" if time_s is None else datetime.fromtimestamp(time_s, UTC).isoformat()
