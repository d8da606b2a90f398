"""The child process that makes a model of an untrusted `config.json` first:
`python -m trainer.engines.torch.hf.fit_child`. See `child_limits.serve`.

    parent ──{"model_config": …, "shapes": {"lm_head.weight": [32, 8], …}, …}──▶ child
           ◀──null, or an error of `check_shapes`─────────────────────────────────
"""

from typing import Final

from storage.errors import ConfigError, CorruptError
from storage.machine.child_limits import open_replies, serve
from storage.records.types import Json
from trainer.engines.torch.hf.building import auto_classes, check_shapes

ERRORS: Final = (ConfigError, CorruptError)


def answer(*, model_config: Json, shapes: dict[str, list[int]], num_bytes: int) -> None:
    check_shapes(model_config, {name: tuple(shape) for name, shape in shapes.items()}, num_bytes)


if __name__ == "__main__":
    replies = open_replies()
    auto_classes()
    serve(answer, replies, ERRORS)
