"""The command `astraflow episodes`: the episodes of all shards of a run."""

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.output.terminal import (
    AsJson,
    RunId,
    console,
    local_path,
    run_or_newest,
    say,
    show,
    store,
    warn,
)
from storage.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from storage.store.object_store import ObjectStore
    from tasks.episodes.index import EpisodeIndex
    from tasks.episodes.selection import Selection

PROBLEMS_SHOWN = 5
TOKENS_SHOWN = 2**15
"""Tokens that the tables of one episode have; each is a row."""
_ID = re.compile(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})")


def episodes(
    run: RunId = None,
    policy: Annotated[
        str, typer.Option(help="Episodes in which this policy sampled a token.", metavar="NAME")
    ] = "",
    version: Annotated[
        str, typer.Option(help="A version sampled a token: 3, 3-7, '<5', '>=40'.")
    ] = "",
    reward: Annotated[str, typer.Option(help="Reward of the episode: 1, '<0.5', 0..0.5.")] = "",
    failure: Annotated[
        str, typer.Option(help="Failure kind (docs/glossary.md), any or none.", metavar="KIND")
    ] = "",
    region: Annotated[str, typer.Option(help="Region of the worker.", metavar="NAME")] = "",
    prompt: Annotated[
        str,
        typer.Option(
            help="Id of a prompt: its groups are shown side by side; with a *, a filter.",
            metavar="ID",
        ),
    ] = "",
    fate: Annotated[
        str,
        typer.Option(
            help="trained, trained:BATCH, replayed, filtered, filtered:REASON, expired, waiting."
        ),
    ] = "",
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000_000_000,
            metavar="N",
            help="Most episodes to list, the newest first; 0: all.",
        ),
    ] = 50,
    page: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            help="Write a page of all these episodes into this folder, for a browser.",
        ),
    ] = None,
    episode: Annotated[
        str,
        typer.Option(help="Show one episode with its tokens: ORDER.PROMPT.SAMPLE.", metavar="ID"),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show episodes of all shards: what was sampled, by which versions, and what became of it.

    Example:  astraflow episodes --policy solver --reward '<0.5' --fate trained
    """
    from storage.run import runs as stored_runs
    from tasks.episodes.index import EpisodeIndex
    from tasks.episodes.selection import Selection

    filters = {
        "policy": policy,
        "version": version,
        "reward": reward,
        "failure": failure,
        "region": region,
        "prompt": prompt,
        "fate": fate,
    }
    selection = Selection.parse(**filters)
    if episode and any(filters.values()):
        raise ConfigError("--episode shows one episode; give it without conditions")
    place = _place(episode) if episode else None
    name = run_or_newest(run)
    stored = stored_runs.open_run(store(), name)
    if page is not None:
        if episode or as_json:
            raise ConfigError("--page writes a page; give it without --episode and --json")
        _write_page(stored, name, selection, page)
        return
    index = EpisodeIndex(stored)
    if place is not None:
        _show_episode(stored, index, place, as_json)
    elif prompt and "*" not in prompt and not as_json:
        _show_prompt(stored, index, selection)
    else:
        _show_list(index, selection, limit, as_json)
    for problem in index.problems[:PROBLEMS_SHOWN]:
        warn(f"skipped, because it cannot be read: {problem}")
    if (more := len(index.problems) - PROBLEMS_SHOWN) > 0:
        warn(f"and {more:,} more objects; `astraflow verify` lists what is damaged")


def _write_page(stored: "ObjectStore", name: str, selection: "Selection", folder: Path) -> None:
    from tasks.reports.episodes_page import INDEX, write_page

    num_episodes = write_page(stored, name, selection, folder)
    say(f"{num_episodes:,} episodes are in {folder / INDEX}")


def _place(episode: str) -> tuple[int, int, int]:
    from storage.plain_names import quoted

    match = _ID.fullmatch(episode)
    if match is None:
        raise ConfigError(
            f"--episode {quoted(episode)} is no episode; write order, prompt and sample as in the "
            "first column of `astraflow episodes`: 7.2.5"
        )
    return int(match[1]), int(match[2]), int(match[3])


def _show_list(index: "EpisodeIndex", selection: "Selection", limit: int, as_json: bool) -> None:
    from deployments.cli.output import episode_tables

    matching = (each for each in index.episodes(newest_first=True) if selection.matches(each))
    listed = list(islice(matching, limit + 1 if limit else None))
    shown = listed[:limit] if limit else listed
    if as_json:
        show(episode_tables.episodes_json(shown), as_json)
        return
    if not shown:
        say("no episode of this run meets the conditions")
        return
    show(episode_tables.episodes_table(shown), as_json)
    if len(listed) > len(shown):
        say(f"more than these {limit:,} meet the conditions; --limit 0 lists all")


def _show_prompt(stored: "ObjectStore", index: "EpisodeIndex", selection: "Selection") -> None:
    from deployments.cli.output import episode_tables
    from storage.plain_names import quoted
    from tasks.episodes.prompt_plays import prompt_plays
    from tasks.episodes.token_decoder import TokenDecoders

    plays = list(prompt_plays(index.shards(), selection, TokenDecoders(stored)))
    if not plays:
        say(f"no episode of the prompt {quoted(selection.prompt)} meets the conditions")
        return
    _page(episode_tables.prompt_picture(plays[-1].prompt, plays))


def _show_episode(
    stored: "ObjectStore", index: "EpisodeIndex", place: tuple[int, int, int], as_json: bool
) -> None:
    from deployments.cli.output import episode_tables
    from storage import layout
    from tasks.episodes.token_decoder import TokenDecoders
    from tasks.episodes.token_view import TOKENS_MAX, Advantages, view

    order, group, number = place
    indexed = index.shard(order)
    played = next((e for e in indexed.episodes if (e.group, e.episode) == (group, number)), None)
    if played is None:
        raise ConfigError(
            f"order {order} has no sample {number} of a prompt {group}; "
            f"it has {len(indexed.shard.groups)} prompts and {len(indexed.episodes)} episodes"
        )
    of_prompt = indexed.shard.groups[group]
    stored_episode = of_prompt.episodes[number]
    tokens_max = TOKENS_MAX if as_json else TOKENS_SHOWN
    turns = [*view(stored_episode, played, TokenDecoders(stored), Advantages(stored), tokens_max)]
    shard = f"{stored.url}/{layout.shard(order)}"
    if as_json:
        described = episode_tables.turns_json(
            played, stored_episode, of_prompt.prompt, turns, shard
        )
        show(described, as_json)
    else:
        _page(
            episode_tables.episode_picture(played, stored_episode, of_prompt.prompt, turns, shard)
        )
    if len(turns) < len(stored_episode.sequences) or any(
        len(turn.tokens) < turn.num_tokens for turn in turns
    ):
        more = "" if as_json else "; --json has more of them"
        warn(f"about {tokens_max:,} tokens of the episode are shown, those at its start{more}")


def _page(content: "RenderableType") -> None:
    """Print through the pager of a terminal; at once into a file or a pipe."""

    screen = console()
    if screen.is_terminal:
        with screen.pager():
            screen.print(content)
    else:
        screen.print(content)
