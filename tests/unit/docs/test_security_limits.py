"""Each limit in `docs/security.md` is that of the code."""

import pytest

from data_ops.prompts import parquet, path, rows, source, window
from rollout.agents import chat_child, chat_process, template_chat
from storage.formats import arrow_sizes, json_objects, json_values, tensor_set
from storage.machine import child_limits
from storage.records import rollouts
from storage.run import prompt_windows
from storage.store import backend, source_files
from tasks.recipes import source as recipe_source
from tasks.recipes import yaml_file
from tests.support.checkout import ROOT
from trainer.engines.torch.hf import building

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
WINDOW_BYTES = window.DataWindow.model_fields["bytes_max"].default


@pytest.mark.parametrize(
    "words",
    [
        f"{backend.ARROW_BYTES_MAX / 2**30:g} GiB for `.arrow`, {backend.BYTES_MAX / 2**20:g} MiB "
        "for other objects",
        f"{yaml_file.BYTES_MAX / 1000:g} kB, {yaml_file.VALUES_MAX:,} values with aliases "
        f"expanded, {yaml_file.NESTING_MAX} levels; {recipe_source.OVERRIDDEN_MAX:,} values that "
        "overrides write",
        f"{tensor_set.EXTRA_FILES_MAX} files without tensors of "
        f"{tensor_set.EXTRA_FILE_BYTES_MAX / 2**20:g} MiB each",
        f"{path.LINE_BYTES_MAX / 2**20:g} MiB for a line of prompts and for the text of a Parquet "
        f"row, {rows.PROMPT_BYTES_MAX / 2**20:g} MiB for a prompt as JSON, "
        f"{parquet.COLUMNS_MAX:,} columns, {parquet.FOOTER_ENTRIES_MAX:,} row groups or nested "
        f"columns and {parquet.MEMORY_BYTES_MAX / 2**30:g} GiB for the rows of a Parquet file",
        f"{source.GENERATED_MAX:,} generated prompts",
        f"{window.FILES_MAX:,} files, `bytes_max` ({WINDOW_BYTES / 2**30:g} GiB) for all of them, "
        f"{source_files.LISTED_MAX:,} objects that one pattern looks at on S3, "
        f"{prompt_windows.ROWS_MAX:,} rows, {prompt_windows.TEXT_BYTES_MAX / 2**30:g} GiB of "
        "their text and 2²² or more of their JSON values; "
        f"{path.FETCHED_BYTES_MAX / 2**30:g} GiB for one file of `path`",
        f"a log-probability that cannot be sampled (above {rollouts.LOGPROB_MAX:g}, below "
        f"−{-rollouts.LOGPROB_MIN:g})",
        f"one with more than {json_values.VALUES_MAX:,} values",
        f"{child_limits.MEMORY_BYTES_MAX / 2**30:g} GiB of memory beyond its libraries: "
        f"{chat_process.LOAD_CPU_S:g} s of CPU time to load it, {chat_process.TEXT_CPU_S:g} s and "
        f"{1000 * chat_process.PART_CPU_S:g} ms for each character for a text, "
        f"{template_chat.TOKENS_PER_CHAR} tokens for each character of its messages and "
        f"{template_chat.CHARS_PER_TOKEN} characters for each token of an answer",
        f"does so after a child has, within {chat_process.CHECK_CPU_S:g} s and "
        f"{chat_child.CHECK_MEMORY_BYTES_MAX / 2**20:g} MiB",
        f"a child process with {building.BUILD_CPU_S:g} s of CPU time and 2 GiB makes it",
    ],
)
def test_each_limit_on_the_page_equals_that_of_the_code(words: str) -> None:
    assert words in PAGE


def test_limits_written_as_powers_equal_those_of_the_code() -> None:
    assert "an Arrow file of 16 MB\nfour" in PAGE  # gigabytes
    assert arrow_sizes.MEMORY_MAX == 4 * 2**30
    assert "2^21 JSON values" in PAGE
    assert json_objects.VALUES_MAX == 2**21
    assert parquet.TEXT_BYTES_MAX == path.LINE_BYTES_MAX
