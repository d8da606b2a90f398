"""The child process that makes a model of an untrusted `config.json` first:
`python -m trainer.engines.torch.fit_child`. See `child_limits.serve`.

    parent ──{"model_config": …, "shapes": {"lm_head.weight": [32, 8], …}, …}──▶ child
           ◀──null, or an error of `check_shapes`─────────────────────────────────
"""

from typing import Final

from storage.errors import ConfigError, CorruptError
from storage.machine.child_limits import limit_cpu, open_replies, serve
from storage.records.types import Json
from trainer.engines.torch.hf_building import auto_classes, check_shapes

START_CPU_S: Final = 240.0
"""CPU seconds after which the kernel ends a child that is still importing."""
ERRORS: Final = (ConfigError, CorruptError)


def answer(*, model_config: Json, shapes: dict[str, list[int]], num_bytes: int) -> None:
    check_shapes(model_config, {name: tuple(shape) for name, shape in shapes.items()}, num_bytes)


if __name__ == "__main__":
    replies = open_replies()
    limit_cpu(START_CPU_S)
    auto_classes()
    serve(answer, replies, ERRORS)
