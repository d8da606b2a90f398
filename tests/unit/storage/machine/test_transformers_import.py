import subprocess
import sys
from types import SimpleNamespace

import pytest

from storage.machine.transformers_import import light_imports

MODEL = """
import sys

import transformers.utils

from storage.machine.transformers_import import light_imports

before = dict(vars(transformers.utils))
with light_imports(transformers.utils):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
assert vars(transformers.utils)["auto_docstring"] is before["auto_docstring"]
assert vars(transformers.utils)["is_sklearn_available"] is before["is_sklearn_available"]
print(sorted({"sklearn", "transformers"} & sys.modules.keys()), Qwen3ForCausalLM.__name__)
"""
ENGINE = """
import sys

from rollout.engines.torch.architecture import completed

assert completed({"model_type": "qwen3", "hidden_size": 64})["head_dim"] == 128
print(sorted({"sklearn", "transformers.masking_utils", "torch._dynamo"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(MODEL, "['transformers'] Qwen3ForCausalLM"), (ENGINE, "[]")],
    ids=["a model", "a configuration, in the rollout engine"],
)
def test_parts_that_nothing_here_uses_are_not_imported(code: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_an_error_in_the_block_leaves_the_names_as_they_were() -> None:
    before = {"is_sklearn_available": object(), "auto_docstring": object(), "other": object()}
    utils = SimpleNamespace(**before)
    with pytest.raises(ImportError), light_imports(utils):
        raise ImportError
    assert vars(utils) == before
