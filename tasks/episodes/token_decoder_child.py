"""The child process of a `TokenDecoder`: `python -m tasks.episodes.token_decoder_child`.

    parent ──{"tokenizer": Base64 of tokenizer.json}──▶ child ──▶ null
           ──{"tokens": [349, 358]}───────────────────▶       ──▶ "approve<|end|>"

See `child_limits.serve`.
"""

import base64
import time
from collections.abc import Sequence
from typing import Any, Final

from storage.errors import CorruptError
from storage.machine.child_limits import limit_cpu, open_replies, serve

ERRORS: Final = (CorruptError,)
CPU_S: Final = 30.0
"""CPU seconds of this process. To load the tokenizer of a common model takes up to two."""
TOKEN_CPU_S: Final = 0.001
"""CPU seconds more for each token that is decoded. Those of common models take microseconds."""


class DecoderChild:
    """The tokenizer of this process, which the first question brings."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._num_tokens = 0

    def answer(self, *, tokenizer: str = "", tokens: Sequence[int] = ()) -> str | None:
        self._num_tokens += len(tokens)
        left_s = CPU_S + TOKEN_CPU_S * self._num_tokens - time.process_time()
        limit_cpu(max(left_s, 0.001))  # 0 would be none
        from tokenizers import Tokenizer

        try:
            if tokenizer:
                self._tokenizer = Tokenizer.from_str(base64.b64decode(tokenizer).decode())
                return None
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        except MemoryError:
            raise
        except BaseException as error:  # the package raises Exception; a panic is none
            raise CorruptError(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    serve(DecoderChild().answer, open_replies(), ERRORS)
