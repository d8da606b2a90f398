"""The child process of a chat: `python -m rollout.agents.chat_child`. See `child_limits.serve`.

The first question has the files of a base model: {"files": {"tokenizer.json": Base64, …}}. The
answer to it is the list of the end tokens. The others are calls of the chat, such as
{"call": "text", "tokens": [349, 358]}.
"""

import base64
import os
from collections.abc import Mapping
from typing import Any, Final

from rollout.agents.template_chat import TemplateChat, load_chat, load_tokenizer
from storage.errors import ConfigError, CorruptError
from storage.machine.child_limits import (
    address_space_bytes,
    limit_memory,
    open_replies,
    serve,
)

ERRORS: Final = (ConfigError, CorruptError, OSError)
"""What the parent raises again, by its name."""
CHECK_MEMORY_BYTES_MAX: Final = 768 << 20
"""Of a tokenizer that another process will make, too, without a limit. One of 42 MB takes 505 MiB.
"""
CALLS: Final = ("opening", "continuation", "text")


def main() -> None:
    replies = open_replies()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one text at a time needs no other threads
    _import_transformers()
    serve(ChatChild().answer, replies, ERRORS)


class ChatChild:
    """The chat of this process, which the first question brings."""

    def __init__(self) -> None:
        self._chat: TemplateChat | None = None

    def answer(
        self, *, files: Mapping[str, str] | None = None, call: str = "", **arguments: Any
    ) -> Any:
        if files is not None:
            read = {name: base64.b64decode(body) for name, body in files.items()}
            if call == "check":
                limit_memory(address_space_bytes() + CHECK_MEMORY_BYTES_MAX)
                load_tokenizer(read)
                return None
            self._chat = load_chat(read)
            return self._chat.stop_ids
        assert call in CALLS
        return getattr(self._chat, call)(**arguments)


def _import_transformers() -> None:
    """Import the part of transformers that makes tokenizers, which is most of the start.

    It imports torch where that is installed: half of the time, and nothing that a tokenizer uses.
    """
    import transformers.utils

    utils: Any = transformers.utils
    utils.is_torch_available = lambda: False
    from transformers import PreTrainedTokenizerFast  # noqa: F401


if __name__ == "__main__":
    main()
