"""The prompts of one place of a run's recipe: of a data window the rows that the run froze, of any
other source what it gives.
"""

from data_ops.prompts import PromptSource
from data_ops.prompts.stream import PromptStream
from data_ops.prompts.window import WindowPrompts
from storage import layout
from storage.errors import ConfigError
from storage.run import prompt_windows, runs
from storage.store.object_store import ObjectStore


def stream_of(run: ObjectStore, place: str, source: PromptSource) -> PromptStream:
    """Return the stream of the prompts.

    Args:
        place: `data.prompts` or `evaluation.prompts`, as in `run.json`.

    Raises:
        ConfigError: the source cannot be read, or the run has no frozen rows for the place.
        CorruptError: the frozen rows are missing or have another digest; names their key.
    """
    if not isinstance(source, WindowPrompts):
        return source.stream()
    window = runs.read_run(run).windows.get(place)
    if window is None:
        raise ConfigError(
            f"{place} is a data window, and {run.url}/{layout.RUN} names no rows of it: they are "
            "frozen when a run is created; start the run under another id"
        )
    frozen = prompt_windows.read(run, window)
    return PromptStream(frozen.prompt, len(frozen.ids), source.seed)
