"""The data windows of a run, which are read once, when the run is created.

    files ──read──▶ prompts/{sha256}.arrow ──then──▶ run.json: bounds, files, digest

All windows are read before anything is stored. A creation that dies before `run.json` leaves
objects that the next one uses, if it reads the same rows; others have another name, and belong to
no run.
"""

from data_ops.prompts.window import WindowPrompts, WindowRows, read
from storage.errors import ConfigError
from storage.records.windows import PromptWindow
from storage.run import prompt_windows
from storage.store.object_store import ObjectStore
from tasks.recipes.run_config import RunConfig


def freeze(run: ObjectStore, config: RunConfig) -> dict[str, PromptWindow]:
    """Read and store the rows of the recipe's data windows; return place → window for `run.json`.

    Raises:
        EmptyWindowError: a window has no row; names the place. Nothing was stored.
        ConfigError: the files of a window cannot be used; names the place.
        TransientError: the server of the files, or the store, does not answer.
    """
    sources = {"data.prompts": config.data.prompts}
    if config.evaluation is not None:
        sources["evaluation.prompts"] = config.evaluation.prompts
    windows = {
        place: source for place, source in sources.items() if isinstance(source, WindowPrompts)
    }
    found: dict[str, WindowRows] = {}
    for place, source in windows.items():
        try:
            found[place] = read(source)
        except ConfigError as error:
            raise type(error)(f"{place}: {error}") from error
    return {
        place: PromptWindow(
            since_s=source.window.since_s,
            until_s=source.window.until_s,
            date_column=source.window.date_column,
            files=found[place].files,
            rows=len(found[place].prompts),
            digest=prompt_windows.create(run, found[place].prompts),
        )
        for place, source in windows.items()
    }
