"""The page of all episodes: a folder that a browser opens without a server and without a network.

    OUT/index.html            filters, list, one episode, a prompt over the versions
    OUT/data/episodes-0000.js rows of the list, some thousands each, the newest order first
    OUT/data/shard-7.js       prompts and tokens of one order, loaded when an episode is opened

A file has one call with plain JSON. The page inserts stored text as text only; control characters
are escaped.
"""

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import uuid4

from storage import layout
from storage.errors import ConfigError
from storage.store.object_store import ObjectStore
from storage.written_files import TEMPORARY_PREFIX
from tasks.episodes.index import EpisodeIndex, IndexedShard, PlayedEpisode
from tasks.episodes.selection import FATES, Selection
from tasks.episodes.token_decoder import TokenDecoders
from tasks.episodes.token_view import (
    SEQUENCE_TOKENS,
    TOKENS_MAX,
    Advantages,
    ViewedSequence,
    ViewedToken,
    view,
)
from tasks.reports.figures import policy_colors
from tasks.reports.templates import clock_time, template
from tasks.reports.words import WORDS
from tasks.terminal_text import one_line, visible

log = logging.getLogger(__name__)

CHUNK_EPISODES = 5_000
CHUNKS_LOADED = 10
"""Chunks that the page loads at first; a button loads the others."""
TOKENS_PER_SEQUENCE_MAX = 4_000
"""Tokens in the page of one sequence; the middle of a longer one is left out."""
SHARD_TOKENS_MAX = 2**22
"""Tokens in the page of one shard; a small one may have millions."""
INDEX, DATA = "index.html", "data"
_DATA_FILE = re.compile(r"(episodes|shard)-\d+\.js")
MARK = '<meta name="generator" content="astraflow episodes">'
"""Recognizes an earlier page, which may be replaced."""


class _Codes:
    """Numbers of repeated strings, in the order in which they first occur."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def of(self, text: str) -> int:
        return self._codes.setdefault(text, len(self._codes))

    @property
    def texts(self) -> list[str]:
        return list(self._codes)


class _Words:
    """The repeated strings of a page: its data has their numbers."""

    def __init__(self) -> None:
        self.policies, self.regions, self.failures = _Codes(), _Codes(), _Codes()
        self.names, self.reasons = _Codes(), _Codes()

    def texts(self) -> dict[str, list[str]]:
        return {name: codes.texts for name, codes in vars(self).items()}


def write_page(run: ObjectStore, run_id: str, selection: Selection, folder: Path) -> int:
    """Write the page of the selected episodes; return how many they are.

    An earlier page in `folder` is replaced when the new one is complete.

    Raises ConfigError for a folder with other files, and for one that cannot be written.
    """
    check_folder(folder)
    temporary = folder.absolute().parent / f"{TEMPORARY_PREFIX}{uuid4().hex}"
    try:
        (temporary / DATA).mkdir(parents=True)
        num_episodes = _write(run, run_id, selection, temporary)
        check_folder(folder)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); name a folder in a writable one"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return num_episodes


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder with files that are not of an earlier page."""
    try:
        names = set(os.listdir(folder)) if folder.exists() else set()
        page = folder / INDEX
        is_page = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")
        data = os.listdir(folder / DATA) if is_page else []
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); name a folder") from error
    is_ours = is_page and names <= {INDEX, DATA} and all(map(_DATA_FILE.fullmatch, data))
    if names and not is_ours:
        raise ConfigError(
            f"{folder} has files that `astraflow episodes` has not written; name a new or an empty "
            "folder"
        )


def _write(run: ObjectStore, run_id: str, selection: Selection, folder: Path) -> int:
    index, words = EpisodeIndex(run), _Words()
    decoders, advantages = TokenDecoders(run), Advantages(run)
    num_episodes, chunk = 0, 0
    rows: list[list[Any]] = []
    for indexed in index.shards(newest_first=True):
        selected = [episode for episode in indexed.episodes if selection.matches(episode)]
        if not selected:
            continue
        order = indexed.shard.order
        described = _shard(indexed, selected, decoders, advantages, words)
        _write_call(folder / DATA / f"shard-{order}.js", "shard", order, described)
        rows += [_row(episode, words) for episode in selected]
        num_episodes += len(selected)
        while len(rows) >= CHUNK_EPISODES:
            _write_chunk(folder, chunk, rows[:CHUNK_EPISODES])
            rows, chunk = rows[CHUNK_EPISODES:], chunk + 1
    if rows:
        _write_chunk(folder, chunk, rows)
        chunk += 1
    facts = {
        "run": run_id,
        "shards": f"{run.url}/{layout.SHARDS}/",
        "chunks": chunk,
        "loaded": CHUNKS_LOADED,
        "episodes": num_episodes,
        "fates": list(FATES),
        **words.texts(),
    }
    page = template("episodes.html.j2").render(
        run_id=run_id,
        facts=facts,
        made=clock_time(time.time()),
        num_episodes=num_episodes,
        problems=index.problems,
        colors=policy_colors(words.policies.texts),
        words=WORDS,
        mark=MARK,
    )
    (folder / INDEX).write_text(page, encoding="utf-8")
    return num_episodes


def _write_chunk(folder: Path, number: int, rows: list[list[Any]]) -> None:
    _write_call(folder / DATA / f"episodes-{number:04d}.js", "chunk", number, [_json(rows)])


def _write_call(file: Path, function: str, number: int, parts: Iterable[str]) -> None:
    """Write a script that calls `astraflow.FUNCTION(number, value)`; `parts` are its JSON."""
    with file.open("w", encoding="utf-8") as script:
        script.write(f"astraflow.{function}({number},")
        script.writelines(parts)
        script.write(");\n")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _row(episode: PlayedEpisode, words: _Words) -> list[Any]:
    """Return an episode as the page's list has it: its place, facts, and sequences."""
    return [
        episode.order,
        episode.group,
        episode.episode,
        one_line(episode.prompt_id),
        words.regions.of(one_line(episode.region)),
        _number(episode.reward),
        words.failures.of(episode.failure),
        [
            [
                words.policies.of(each.policy),
                each.min_version,
                each.max_version,
                FATES.index(each.fate.fate),
                each.fate.batch,
                words.reasons.of(one_line(each.fate.reason)),
                list(each.fate.replays),
                each.place,
            ]
            for each in episode.sequences
        ],
    ]


def _shard(
    indexed: IndexedShard,
    selected: list[PlayedEpisode],
    decoders: TokenDecoders,
    advantages: Advantages,
    words: _Words,
) -> Iterator[str]:
    """Yield the JSON of the prompts and of the selected episodes of one shard with their tokens.

    One episode is in memory at a time: a token takes hundreds of bytes until it is text.
    """
    groups = indexed.shard.groups
    left, is_cut = SHARD_TOKENS_MAX, False

    def turns(played: PlayedEpisode) -> Iterator[dict[str, Any]]:
        nonlocal left, is_cut
        episode = groups[played.group].episodes[played.episode]
        size = sum(SEQUENCE_TOKENS + len(sequence.tokens) for sequence in episode.sequences)
        is_cut |= size > min(left, TOKENS_MAX)
        for turn in view(episode, played, decoders, advantages, min(left, TOKENS_MAX)):
            left -= SEQUENCE_TOKENS + len(turn.tokens)
            yield _turn(turn, words)

    prompts = {
        str(index): _fields(groups[index].prompt.fields)
        for index in sorted({episode.group for episode in selected})
    }
    yield f'{{"worker":{_json(one_line(indexed.shard.worker))},"prompts":{_json(prompts)}'
    yield ',"episodes":{'
    for number, played in enumerate(selected):
        described = {
            "seconds": _number(played.seconds),
            "error": visible(groups[played.group].episodes[played.episode].error or ""),
            "metrics": _fields(groups[played.group].episodes[played.episode].metrics),
            "turns": list(turns(played)),
        }
        yield f'{"," if number else ""}"{played.group}.{played.episode}":{_json(described)}'
    yield "}}"
    if is_cut:
        log.warning(
            "the page has the first %d tokens of order %d, and the first %d of an episode; "
            "`astraflow episodes --episode` shows others",
            SHARD_TOKENS_MAX,
            indexed.shard.order,
            TOKENS_MAX,
        )


def _fields(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (one_line(name), f"{value:g}" if isinstance(value, float) else visible(str(value)))
        for name, value in values.items()
    ]


def _turn(turn: ViewedSequence, words: _Words) -> dict[str, Any]:
    return {
        "place": turn.place,
        "name": visible(turn.name),
        "reward": _number(turn.reward),
        "temperature": turn.temperature,
        "end": turn.finish_reason,
        "length": turn.num_tokens,
        "pieces": list(_pieces(turn.tokens, turn.num_tokens, words)),
    }


def _pieces(tokens: tuple[ViewedToken, ...], num_tokens: int, words: _Words) -> Iterator[list[Any]]:
    """Yield runs of tokens that differ in text and probability alone.

    [owner, version, in loss, advantage, texts, log-probabilities]; a number alone is how many
    tokens are left out there.
    """
    left_out = max(0, len(tokens) - TOKENS_PER_SEQUENCE_MAX)
    head = TOKENS_PER_SEQUENCE_MAX // 2
    yield from _runs(tokens[:head] if left_out else tokens, words)
    if left_out:
        yield [left_out]
        yield from _runs(tokens[head + left_out :], words)
    if num_tokens > len(tokens):
        yield [num_tokens - len(tokens)]


def _runs(tokens: tuple[ViewedToken, ...], words: _Words) -> Iterator[list[Any]]:
    def common(token: ViewedToken) -> tuple[str, int, bool, float | None]:
        advantage = None if token.advantage is None else _number(token.advantage)
        return token.owner, token.version, token.is_in_loss, advantage

    for (owner, version, in_loss, advantage), run in groupby(tokens, key=common):
        same = list(run)
        if not owner:
            yield [-1, version, 0, None, ["".join(visible(token.text) for token in same)], []]
            continue
        yield [
            words.policies.of(owner),
            version,
            int(in_loss),
            advantage,
            [visible(token.text) for token in same],
            [_number(token.logprob) for token in same],
        ]


def _number(value: float) -> float | None:
    """Return a number with few digits; None for one that JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
