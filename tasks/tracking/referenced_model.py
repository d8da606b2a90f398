"""A registered model whose weights are in the store of its run: what MLflow loads it with.

    mlflow.pyfunc.load_model(uri) ─▶ reference.json ─▶ weights of the store, verified ─▶ pipeline

The loading process needs AstraFlow, and the store's credentials in its environment. MLflow's files
are untrusted: names are checked, and the weights must have the digest of the reference.
"""

import tempfile
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import build, dump, parse
from storage.formats.model_config import MODEL_CONFIG
from storage.formats.safetensors import from_safetensors
from storage.plain_names import PartName, RunId
from storage.records.numbers import Count
from storage.run import runs
from storage.store.object_store import open_store
from storage.weights import manifests
from storage.written_files import write_inside
from tasks.maintenance.export_folder import WEIGHTS_FILE

REFERENCE = "reference.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class WeightsReference:
    """Which version of which run a registered model is."""

    store: str
    """Address of the run's store, without credentials."""
    run_id: RunId
    policy: PartName
    version: Count
    digest: str
    """Of the weights."""


def describe(reference: WeightsReference) -> bytes:
    """Return the content of `reference.json`."""
    return dump(vars(reference))


def _restrict_generation(folder: Path, tokenizer: Any) -> None:
    """Leave the numbers of tokens in the settings of generation, and `predict` to its caller.

    Others may ask for any number of answers and beams. Numbers of no token are left out, too.
    """
    file = folder / GENERATION_CONFIG
    settings = parse(file.read_bytes(), GENERATION_CONFIG) if file.exists() else {}
    numbers = set(tokenizer.get_vocab().values())
    tokens = {
        key: value
        for key, value in settings.items()
        if key.endswith("_token_id") and _are_all_in(value, numbers)
    }
    write_inside(folder, GENERATION_CONFIG, dump(tokens))


def _are_all_in(value: Any, numbers: Set[int]) -> bool:
    listed = value if isinstance(value, list) else [value]
    return all(type(number) is int and number in numbers for number in listed)


class ReferencedModel:
    """A text generation pipeline in the form that MLflow's flavor `python_function` calls."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Generate an answer to each prompt.

        Args:
            model_input: prompts: a list of text, or a table whose first column has them.
            params: of the generation, such as `max_new_tokens`.
        """
        prompts: Sequence[str] = (
            model_input.iloc[:, 0].tolist() if hasattr(model_input, "iloc") else list(model_input)
        )
        answers = self.pipeline(list(prompts), return_full_text=False, **(params or {}))
        return [answer[0]["generated_text"] for answer in answers]


def _load_pyfunc(path: str) -> ReferencedModel:
    """Load the model; MLflow calls this function by name.

    Raises:
        ConfigError: the store does not have the weights that were registered, or its files make no
            tokenizer, or transformers makes no model of them.
        CorruptError: `reference.json` or a weights file is damaged, or `config.json` is missing or
            describes another model.
    """
    from rollout.agents.chat_process import check_tokenizer
    from rollout.agents.template_chat import load_tokenizer
    from tasks.maintenance.export import export_model
    from trainer.engines.torch.hf.building import check_fit

    reference = build(WeightsReference, (Path(path) / REFERENCE).read_bytes(), REFERENCE)
    run = runs.open_run(open_store(reference.store), reference.run_id)
    found = manifests.read_manifest(run, reference.policy, reference.version).digest
    if found != reference.digest:
        raise ConfigError(
            f"version {reference.version} of {reference.policy} in run {reference.run_id} of "
            f"{reference.store} has other weights ({found}) than those that were registered "
            f"({reference.digest})"
        )
    with tempfile.TemporaryDirectory(prefix="astraflow-model-") as temporary:
        folder = Path(temporary)
        export_model(run, reference.policy, reference.version, folder)
        files = {
            file.name: file.read_bytes() for file in folder.iterdir() if file.name != WEIGHTS_FILE
        }
        check_tokenizer(files)
        tokenizer = load_tokenizer(files)
        if not (folder / MODEL_CONFIG).exists():
            raise CorruptError(f"version 0 of {reference.policy} has no {MODEL_CONFIG}")
        model_config = parse((folder / MODEL_CONFIG).read_bytes(), MODEL_CONFIG)
        check_fit(model_config, from_safetensors((folder / WEIGHTS_FILE).read_bytes()))
        _restrict_generation(folder, tokenizer)
        return ReferencedModel(_pipeline(folder, tokenizer))


def _pipeline(folder: Path, tokenizer: Any) -> Any:
    """Return transformers' pipeline of a checked model; ConfigError where it makes none."""
    from transformers import AutoModelForCausalLM, pipeline

    try:
        # Not by its path: where a class fails, a pipeline tries those that config.json names.
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", local_files_only=True, trust_remote_code=False
        )
        return pipeline("text-generation", model=model, tokenizer=tokenizer)
    except MemoryError:
        raise
    except Exception as error:  # transformers raises anything for a wrong value
        raise ConfigError(
            f"transformers makes no pipeline of the model's {MODEL_CONFIG} and "
            f"{GENERATION_CONFIG}: {type(error).__name__}: {error}; correct this value in the base "
            "model, and register it again"
        ) from error
