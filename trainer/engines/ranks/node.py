"""A node beside the leader's: it makes the leader's calls on its own ranks, and replies.

leader ═ node_link.py ═ serve ──▶ Ranks.call ─▶ this process and its children
"""

import select
from collections.abc import Callable

from storage.errors import ConfigError
from storage.records.types import Json
from trainer.config import TrainConfig
from trainer.engines.ranks.leader import POLL_S, Ranks
from trainer.engines.ranks.messages import content_of, receive, send
from trainer.engines.ranks.node_link import NodeLink, calls_of_leader
from trainer.engines.ranks.rank import CALLS, Rank, error_reply
from trainer.engines.ranks.rendezvous import Rendezvous


def serve(
    config: TrainConfig,
    node: int,
    rendezvous: Rendezvous,
    must_leave: Callable[[], bool],
    *,
    trusts_leader: bool = False,
) -> str:
    """Train with the leader until it leaves, the round is over, or this node must leave.

    Args:
        must_leave: asked between two calls, about every second.
        trusts_leader: whether engines are built with settings other than `config`.

    Returns why it ended.

    Raises RankLostError when a rank is lost, and what `Ranks` raises.
    """
    ranks = Ranks(config, node, rendezvous)
    assert ranks.nodes is not None, "it is the group of several nodes"
    rank = Rank()
    own = None if trusts_leader else config
    try:
        channel, thread = calls_of_leader(NodeLink(ranks.nodes, 0))
        with channel:
            while not ranks.over:
                if not select.select([channel], [], [], POLL_S)[0]:
                    if must_leave():
                        return "this node must leave"
                    continue
                try:
                    header, content = receive(channel)
                except (EOFError, OSError):
                    thread.join()
                    return "the leader has left"
                send(channel, _reply(ranks, rank, own, header, content))
                del content
                if not ranks.is_open:
                    return "a rank was lost"
        return ranks.over
    finally:
        ranks.close()


def _reply(
    ranks: Ranks, rank: Rank, own: TrainConfig | None, header: Json, content: memoryview
) -> Json:
    try:
        _check(header, own)
        with content_of([content]) as copy:
            ranks.call(header, copy, lambda: rank.call(header, content))
    except Exception as error:  # the leader decides what becomes of it
        return error_reply(error)
    return {}


def _check(header: Json, own: TrainConfig | None) -> None:
    """Raise for a call that no rank of this node may make, before any of them has it.

    Engines are built with the settings `own` only; None trusts the leader.
    """
    if header["call"] not in ("new", *CALLS):
        raise ValueError(f"{header['call']!r} is no call of a train engine")
    if header["call"] == "new" and own not in (None, TrainConfig.model_validate(header["config"])):
        raise ConfigError(
            "the leader trains with other settings than this node: both must be of one run"
        )
