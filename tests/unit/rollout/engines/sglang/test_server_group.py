"""Which server a request goes to."""

from collections import Counter
from dataclasses import dataclass
from typing import cast

from rollout.config import EngineConfig
from rollout.engines.sglang.server import Server
from rollout.engines.sglang.server_group import ServerGroup
from tests.support.models.chain_model import CONFIG


@dataclass(eq=False)
class Busy:
    """A server with requests."""

    running: int = 0


def group_of(*servers: Busy) -> ServerGroup:
    group = ServerGroup(EngineConfig(name="sglang", max_tokens=64), CONFIG)
    group._servers = [cast("Server", server) for server in servers]
    return group


def test_equal_prompts_go_to_one_server_and_different_ones_to_all() -> None:
    group = group_of(Busy(2), Busy(2), Busy(2))
    prompts = [(number, 5) for number in range(60)]
    assert len({group.route((7, 7, 7)) for _ in range(5)}) == 1
    assert set(Counter(map(group.route, prompts))) == set(group._servers)


def test_a_server_with_far_more_requests_than_others_gets_no_further_ones() -> None:
    servers = [Busy(), Busy(), Busy()]
    group = group_of(*servers)
    order = []
    for _ in range(12):
        server = cast("Busy", group.route((7, 7, 7)))
        server.running += 1
        order.append(servers.index(server))
    first = order[0]
    # A server gets a request while it has less than 1.25 times the mean, the new one included.
    expected, running = [], [0, 0, 0]
    for _ in order:
        bound = 1.25 * (sum(running) + 1) / 3
        place = next(each for each in (first, first + 1, first + 2) if running[each % 3] < bound)
        running[place % 3] += 1
        expected.append(place % 3)
    assert order == expected
    assert max(server.running for server in servers) <= 5


def test_one_server_gets_every_request() -> None:
    server = Busy(1000)
    assert group_of(server).route((1,)) is cast("Server", server)
