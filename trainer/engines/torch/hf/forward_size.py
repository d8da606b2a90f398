"""A limit for the elements that a model of an untrusted `config.json` computes.

transformers has code for hundreds of model types, and some of it multiplies tokens by numbers that
no stored tensor limits. So two rows of a few tokens are computed before any other, and the results
of each operation are counted before it is executed:

    all results of a row          ≤ tokens × 32 × the longest sides of all weights, and each once
    those of a single operation   ≤ tokens × the elements of the largest weight
    operations                    ≤ tokens × 2 × the weights, and 32 × the matrices in stacks

Most types take a tenth of each. State space models of the second generation (Bamba, Falcon-H1)
exceed them where their kernels for GPUs are not installed. What is within the limits may still be
far more than a type needs: a mixture of experts that uses all of them for each token.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from storage.errors import ConfigError

LENGTHS: Final = (16, 256)
"""Tokens of the rows that are computed, up to the longest context."""
PADDED_LENGTH: Final = 64
"""Tokens as which a shorter row counts: state space models compute a number of tokens at once."""
RESULTS_PER_SIDE: Final = 32
"""So many elements a token may give for each row or column of the weights. Those of published types
give 1 to 12; of tiny models with many heads of linear attention, up to 27.
"""
OPERATIONS_PER_WEIGHT: Final = 2
"""So many operations a token may take for each weight. Those of published types take a tenth, and
half where a state is computed token after token.
"""
OPERATIONS_PER_MATRIX: Final = 32
"""So many operations a row may take for each matrix of a stack, such as that of experts, which are
computed one after the other, each for all its tokens. Those of published types take up to 8.
"""


def check_forward_size(model: Any, vocab_size: int, positions: int | None) -> None:
    """Run the body of `model` on rows of a few lengths, up to `positions` tokens.

    Raises:
        ConfigError: it computes far more elements than models with such weights do.
    """
    weights = [*model.parameters()]
    largest, total = (of(weight.numel() for weight in weights) for of in (max, sum))
    per_token = RESULTS_PER_SIDE * sum(map(_longest_side, weights))
    for length in sorted({min(each, positions or each) for each in LENGTHS}):
        counted = max(length, PADDED_LENGTH)
        tokens_BT = torch.arange(length, device=weights[0].device)[None] % vocab_size
        limits = _Results(
            model.config.model_type,
            single_max=counted * largest,
            all_max=counted * per_token + total,
            operations_max=counted * OPERATIONS_PER_WEIGHT * len(weights)
            + OPERATIONS_PER_MATRIX * sum(map(_num_in_stack, weights)),
        )
        with torch.no_grad(), limits:
            model.base_model(input_ids=tokens_BT, use_cache=False)


def _longest_side(weight: Tensor) -> int:
    """Return the rows or columns of a matrix, of all in a stack of matrices; all of a vector."""
    return weight.numel() // max(1, min(weight.shape[-2:])) if weight.ndim > 1 else weight.numel()


def _num_in_stack(weight: Tensor) -> int:
    """Return how many matrices a stack of them has; 0 for others, such as the kernels of a
    convolution along the tokens.
    """
    is_stack = weight.ndim > 2 and min(weight.shape[-2:]) > 1
    return math.prod(weight.shape[:-2]) if is_stack else 0


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations and the elements that they allocate; refuse one that would exceed a limit.

    Each operation runs on the device "meta" first, where it has shapes and no values.
    """

    def __init__(
        self, model_type: str, *, single_max: int, all_max: int, operations_max: int
    ) -> None:
        """`single_max`: elements of one operation's results; `all_max`: of all together."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model_type = model_type
        self._single_max, self._all_max = single_max, all_max
        self._operations_max = operations_max
        self.num_elements = self.num_operations = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.num_operations += 1
        if self.num_operations > self._operations_max:
            self._refuse("operations", self.num_operations, self._operations_max)
        if not func.is_view:
            self._check(_num_elements(_shapes(func, args, kwargs)))
        results = func(*args, **kwargs)
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        tensors = [each for each in tree_leaves(results) if isinstance(each, Tensor)]
        computed = _num_elements(each for each in tensors if _storage(each) not in given)
        self._check(computed)
        self.num_elements += computed
        return results

    def _check(self, more: int) -> None:
        """Raise ConfigError where an operation gives too many elements, or all together do."""
        if more > self._single_max:
            self._refuse("elements", more, self._single_max)
        if self.num_elements + more > self._all_max:
            self._refuse("elements", self.num_elements + more, self._all_max)

    def _refuse(self, what: str, found: int, limit: int) -> NoReturn:
        raise ConfigError(
            f"config.json of the base model (model_type {self._model_type}) lets a few tokens take "
            f"{found:,} {what}, of which its weights explain {limit:,}; correct its sizes, or use "
            "another model. A state space model may need a GPU and the package of its kernels"
        )


def _shapes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """Return the results of an operation on the device "meta"; none where its shapes depend on
    values, which is a selection of what was counted.
    """
    try:
        results = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
    except (NotImplementedError, RuntimeError):
        return []
    return [each for each in tree_leaves(results) if isinstance(each, Tensor)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, Tensor) else value


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
