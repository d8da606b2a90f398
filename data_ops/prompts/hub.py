"""Prompts of a data set of the Hugging Face hub; needs the package `datasets` and a network."""

import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Annotated, Final

from pydantic import AfterValidator

from data_ops.prompts.rows import collect
from data_ops.prompts.source import Columns
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError
from storage.formats import json_values
from storage.records.rollouts import Prompt
from storage.records.types import Json
from storage.store.addresses import refusing_credentials

log = logging.getLogger(__name__)

HUB: Final = "hf://datasets/"
"""A name alone would mean a folder of the working directory first, which another user may have put
there.
"""

_check_hub_name = refusing_credentials(
    "write the data set's name, such as openai/gsm8k, and set HF_TOKEN"
)


class HubPrompts(Columns):
    """`prompts: {hub: openai/gsm8k, hub_config: main, split: train, answer_after: "####"}`."""

    hub: Annotated[str, AfterValidator(_check_hub_name)]
    """A data set of the Hugging Face hub, such as `openai/gsm8k`."""
    hub_config: str | None = None
    """The data set's configuration name, such as `main`."""
    split: str = "train"
    """`train`, `test`, or another split of the data set."""

    def stream(self) -> PromptStream:
        """Load the data set. ConfigError where that is impossible, or rows are no prompts."""
        return PromptStream.of(read_hub(self)[: self.limit], self.seed)


def read_hub(source: HubPrompts) -> list[Prompt]:
    """Load a data set of the Hugging Face hub; row n (from 1) becomes the prompt
    `{data set}/{split}/{n - 1}`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"prompts.hub={source.hub} needs the package `datasets`: pip install datasets, or name "
            "a JSONL or Parquet file with prompts.path"
        ) from error
    try:
        rows = datasets.load_dataset(HUB + source.hub, source.hub_config, split=source.split)
    except Exception as error:  # the package raises anything for a damaged data set
        raise ConfigError(
            f"prompts.hub={source.hub} (configuration {source.hub_config}, split {source.split}) "
            f"cannot be loaded ({type(error).__name__}: {error}); check the names and the network, "
            "or name a file with prompts.path"
        ) from error
    what = f"data set {source.hub}"
    return collect(
        source,
        what,
        f"{source.hub}/{source.split}",
        enumerate(_plain_rows(rows, what), start=1),
        "row",
    )


def _plain_rows(rows: Iterable[Json], what: str) -> Iterator[Json]:
    """Yield the rows without the columns whose types JSON lacks (images, times, …); each such
    column is logged once.
    """
    logged: set[str] = set()
    for row in _decoded(rows, what):
        dropped = {name for name, value in row.items() if not json_values.is_plain(value)}
        if dropped - logged:
            log.warning(
                "%s: columns %s are left out, because JSON cannot hold their types",
                what,
                ", ".join(map(repr, sorted(dropped - logged))),
            )
            logged |= dropped
        yield {name: value for name, value in row.items() if name not in dropped}


def _decoded(rows: Iterable[Json], what: str) -> Iterator[Json]:
    """Yield the rows, which are decoded as they are taken."""
    decoded = iter(rows)
    for number in count(1):
        try:
            row = next(decoded)
        except StopIteration:
            return
        except Exception as error:  # an image that is none, a package for audio that is missing
            raise ConfigError(
                f"{what}, row {number}: cannot be read ({type(error).__name__}: {error}); "
                "correct that, or name a file without the column with prompts.path"
            ) from error
        yield row
