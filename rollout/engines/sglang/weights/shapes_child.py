"""The child process that makes a model of an untrusted `config.json`:
`python -m rollout.engines.sglang.weights.shapes_child`. See `child_limits.serve`.

    parent ──{"model_config": …, "num_tensors": 14}──▶ child: `built_shapes`
           ◀──[{"lm_head.weight": [32, 8], …}, ["lm_head.weight"]]──
"""

from typing import Any, Final

from rollout.engines.sglang.weights.shapes import built_shapes
from storage.errors import ConfigError
from storage.machine.child_limits import open_replies, serve
from storage.records.types import Json

ERRORS: Final = (ConfigError,)
ANSWER_CHARS_MAX: Final = 1 << 26
"""Of the answer as JSON. A model with a tensor for each of its experts has a hundred thousand."""


def answer(*, model_config: Json, num_tensors: int) -> Any:
    shapes, tied = built_shapes(model_config, num_tensors)
    return [{name: list(shape) for name, shape in shapes.items()}, sorted(tied)]


if __name__ == "__main__":
    replies = open_replies()
    from transformers import AutoModelForCausalLM  # noqa: F401 -- most of the start

    serve(answer, replies, ERRORS, ANSWER_CHARS_MAX)
