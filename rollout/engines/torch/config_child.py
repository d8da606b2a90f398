"""The child process that completes an untrusted `config.json` by transformers:
`python -m rollout.engines.torch.config_child`. See `child_limits.serve`.
"""

from typing import Final

from rollout.engines.torch.architecture import completed
from storage.errors import ConfigError
from storage.machine.child_limits import open_replies, serve
from storage.records.types import Json

ERRORS: Final = (ConfigError,)


def answer(*, config: Json) -> Json:
    return completed(config)


if __name__ == "__main__":
    replies = open_replies()
    from transformers import AutoConfig  # noqa: F401 -- most of the start

    serve(answer, replies, ERRORS)
