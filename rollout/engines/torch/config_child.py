"""The child process that completes an untrusted `config.json` by transformers:
`python -m rollout.engines.torch.config_child`. See `child_limits.serve`.
"""

from typing import Final

from rollout.engines.torch.architecture import completed
from storage.errors import ConfigError
from storage.machine.child_limits import limit_cpu, open_replies, serve
from storage.records.types import Json

START_CPU_S: Final = 240.0
"""CPU seconds after which the kernel ends a child that is still importing."""
ERRORS: Final = (ConfigError,)


def answer(*, config: Json) -> Json:
    return completed(config)


if __name__ == "__main__":
    replies = open_replies()
    limit_cpu(START_CPU_S)
    from transformers import AutoConfig  # noqa: F401 -- most of the start

    serve(answer, replies, ERRORS)
