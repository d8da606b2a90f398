"""Checks of the prompts of a recipe: sources that can be read, and held-out ones that are held out.

Files that the recipe names are read here, and classes that it names are imported.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from data_ops.prompts import PromptSource
from data_ops.prompts.builtin import BuiltinPrompts
from data_ops.prompts.custom import CustomPrompts
from data_ops.prompts.path import SUFFIXES, FilePrompts
from storage.errors import ConfigError
from storage.store.source_files import is_remote
from tasks.recipes.run_config import HELD_OUT_MAX, RunConfig
from tasks.recipes.yaml_file import KeyPath


def faults(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is wrong with the sources of prompts, and where."""
    train = config.data.prompts
    yield from _source(("data", "prompts"), train)
    for path, source in held_out_sources(config).items():
        if path[0] == "evaluation" and (source.limit or 0) > HELD_OUT_MAX:
            yield (
                (*path, "limit"),
                f"{source.limit:,} prompts are too many for an evaluation; at most "
                f"{HELD_OUT_MAX:,} are played",
            )
        yield from _source(path, source)
        yield from _held_out(path, source, train)


def held_out_sources(config: RunConfig) -> Mapping[KeyPath, PromptSource]:
    """Return the sources of the evaluation and of the gate: path in the recipe → source."""
    sources: dict[KeyPath, PromptSource] = {}
    if config.evaluation is not None:
        sources["evaluation", "prompts"] = config.evaluation.prompts
    if config.gate is not None:
        sources |= {
            ("gate", "datasets", name): source for name, source in config.gate.datasets.items()
        }
    return sources


def _held_out(
    path: KeyPath, source: PromptSource, train: PromptSource
) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(source, BuiltinPrompts) and source.limit is None:
        yield path, "a built-in source is endless; set limit, for example limit: 500"
    if source.model_dump(exclude={"seed", "limit"}) == train.model_dump(exclude={"seed", "limit"}):
        split = getattr(train, "split", None)
        which, example = (f" (split {split})", "split: test") if split else ("", "another file")
        yield (
            path,
            f"is the training set itself{which}; evaluate on prompts that are held out, for "
            f"example {example}",
        )


def _source(path: KeyPath, source: PromptSource) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(source, FilePrompts) and not is_remote(source.path):  # else where the run is
        yield from _file(path, source)
    elif isinstance(source, CustomPrompts):
        try:
            source.find()
        except ConfigError as error:
            yield (*path, "custom"), str(error)


def _file(path: KeyPath, source: FilePrompts) -> Iterator[tuple[KeyPath, str]]:
    at: KeyPath = (*path, "path")
    file = Path(source.path)
    if os.path.isdir(file):
        names = [name for name in _names_in(file) if name.endswith(SUFFIXES)]
        example = file / (names or ["train.jsonl"])[0]
        yield at, f"{file} is a folder; name one file, such as {example}"
    elif os.path.exists(file) and not os.path.isfile(file):
        yield at, f"{file} is a pipe, a device or a socket; name a file"
    elif not os.path.isfile(file):
        near = difflib.get_close_matches(file.name, _names_in(file.parent), n=1)
        yield at, f"{file} does not exist" + (f"; did you mean {near[0]}?" if near else "")
    elif file.suffix not in SUFFIXES:
        yield at, f"{file.name} is neither .jsonl nor .parquet; convert it to one of them"
    else:
        try:
            source.stream()
        except ConfigError as error:  # with the lines of the mistakes
            yield at, str(error)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):  # no folder, or one that cannot be read
        return []
