"""Imports of transformers without what nothing here uses, which is half of their CPU time.

with torch already imported        all of it    in the block
AutoConfig.for_model("qwen3")      9 s          2.3 s
AutoModelForCausalLM               9 s          6 s
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _undocumented(documented: Any = None, **_: object) -> Any:
    """Stand in for the decorator `auto_docstring`, with arguments or without."""
    return (lambda each: each) if documented is None else documented


_REPLACED: dict[str, Callable[..., Any]] = {
    # scikit-learn, and SciPy and pandas with it, for one way of generating text
    "is_sklearn_available": lambda: False,
    # the docstring of each class of configurations: its text names the classes of all models
    "auto_docstring": _undocumented,
}


@contextmanager
def light_imports(utils: Any) -> Iterator[None]:
    """Import names of transformers in the block; `utils` is its module `transformers.utils`."""
    before = {name: getattr(utils, name, None) for name in _REPLACED}  # private in this form
    vars(utils).update(_REPLACED)
    try:
        yield
    finally:
        vars(utils).update(before)
