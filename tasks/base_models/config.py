"""Settings of the sources of base models, and the table of them.

Importing this module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeAlias, cast

from pydantic import AfterValidator, Discriminator, Tag, model_validator

from storage.config_model import Count, CountOrNone, Frozen, Layers, OnlyWith, Seed, Width
from storage.config_union import ByKey, variants
from storage.coordination.lifetime import StoppedError
from storage.errors import AstraFlowError, ConfigError
from storage.formats.json_objects import parse
from storage.formats.model_config import MODEL_CONFIG
from storage.import_path import PluginKind, construct, described, find_class
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.store.addresses import check_local_path, refusing_credentials
from storage.store.object_store import ObjectStore
from tasks.base_models.folders import Progress, folder_config, read_model_folder, snapshot
from tasks.base_models.stored import RegisteredModel, RunModel

ModelFiles: TypeAlias = tuple[Mapping[str, HostTensor], Mapping[str, bytes]]
"""Tensors and other files of a model, by name."""

PARAMETERS_MAX = 2**27
"""Parameters in the layers of a tiny model: its training needs 16 bytes of memory for each."""


class TinyBase(Frozen):
    """The embedded base model: a small Qwen3, trained on chained addition at its first use."""

    hidden: Width = 64
    layers: Layers = 2
    heads: Layers = 4
    kv_heads: Layers = 2
    head_dim: Width = 16
    intermediate: Width = 192
    skill_iterations: CountOrNone = 560
    """Supervised iterations that teach the skill."""
    habit_iterations: CountOrNone = 60
    """Supervised iterations that add bad habits, so that reinforcement learning can improve it."""
    batch_size: Annotated[
        Count, OnlyWith("skill_iterations", where=OnlyWith("habit_iterations", 0))
    ] = 64
    seed: Seed = 0

    @model_validator(mode="after")
    def _possible_shape(self) -> "TinyBase":
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}: each key and "
                "value head serves the same number of heads; change either"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} is odd, but positions rotate pairs of its elements; use "
                f"{self.head_dim + 1}"
            )
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        num_parameters = self.layers * self.hidden * (attention + 3 * self.intermediate)
        if num_parameters > PARAMETERS_MAX:
            raise ValueError(
                f"its layers have {num_parameters:,} parameters, and at most {PARAMETERS_MAX:,} "
                "are trained from scratch; make layers, hidden or intermediate smaller, or name a "
                "trained model with path or hub"
            )
        return self


class TinyModel(Frozen):
    """`model: {tiny: {}}`."""

    tiny: TinyBase
    """The embedded base model."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Build the model, unless the store has it."""
        from tasks.base_models.publishing import ensure_tiny

        return ensure_tiny(store, self.tiny, progress)

    def config_json(self) -> Json:
        """Return the model's `config.json`."""
        from tasks.base_models.tiny import model_files

        return parse(model_files(self.tiny)[MODEL_CONFIG], MODEL_CONFIG)


class FolderModel(Frozen):
    """`model: {path: models/mine}`."""

    path: Annotated[str, AfterValidator(check_local_path)]
    """A folder that `AutoModelForCausalLM.from_pretrained` loads."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Read the folder."""
        return read_model_folder(Path(self.path), progress)

    def config_json(self) -> Json:
        """Read the folder's `config.json`; ConfigError when that is impossible."""
        return folder_config(Path(self.path))


_check_hub_name = refusing_credentials(
    "write the model's name, such as Qwen/Qwen3-1.7B, and set HF_TOKEN"
)


class HubModel(Frozen):
    """`model: {hub: Qwen/Qwen3-1.7B}`."""

    hub: Annotated[str, AfterValidator(_check_hub_name)]
    """A model of the Hugging Face hub."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Fetch the model into the hub's cache and read it there."""
        return read_model_folder(snapshot(self.hub, progress), progress)

    def config_json(self) -> Json:
        """Fetch the model's `config.json` alone; ConfigError when that is impossible."""
        return folder_config(snapshot(self.hub, lambda sentence, share: None, (MODEL_CONFIG,)))


class ModelSource(Protocol):
    """A base model from outside of AstraFlow (see `docs/extending/sources.md`)."""

    def load(self, progress: Progress) -> ModelFiles:
        """Return the tensors and the other files of the model.

        Tensors have Hugging Face parameter names, floating-point ones in BF16, tied ones once. The
        files are `config.json` and those of the tokenizer, by name. `progress` takes a sentence and
        the finished share. The same arguments must always give the same bits.
        """


MODEL: Final = PluginKind("base model", ModelSource, "docs/extending/sources.md")


class CustomModel(Frozen):
    """`model: {custom: "my_package.my_module:MyModel", args: {layers: 4}}`."""

    custom: str
    """Import path `package.module:Name` of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Import the class, construct it and load the model; ConfigError if that is impossible."""
        keys = "model.custom", "model.args"
        source: ModelSource = construct(self.find, self.custom, self.args, keys)
        try:
            loaded: Any = source.load(progress)
        except (AstraFlowError, StoppedError):
            raise
        except Exception as error:  # as above
            raise ConfigError(
                f"model.custom: load() of {self.custom} failed: {described(error)}"
            ) from error
        if fault := _model_files_fault(loaded):
            raise ConfigError(
                f"model.custom: load() of {self.custom} returned {fault}; it must return "
                "(tensors, files): HostTensor by name, at least one, and bytes by name"
            )
        return cast(ModelFiles, loaded)

    def config_json(self) -> Json:
        """Raise ConfigError: only `load` gives the files of a custom model."""
        raise ConfigError(f"the sizes of {self.custom} are known only when it is loaded")

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not a base model, or takes other arguments than `args`.
        """
        return find_class(self.custom, MODEL, self.args)


def _model_files_fault(loaded: Any) -> str:
    """Return what is wrong with the result of `ModelSource.load`; empty for nothing."""
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        return f"a {type(loaded).__name__}"
    for part, kind, noun in zip(loaded, (HostTensor, bytes), ("tensor", "file"), strict=True):
        if not isinstance(part, Mapping):
            return f"a {type(part).__name__} of {noun}s"
        for name, value in part.items():
            if not isinstance(name, str) or not isinstance(value, kind):
                return f"a {type(value).__name__} as the {noun} {name!r}"
    return "" if loaded[0] else "no tensor"


ModelConfig: TypeAlias = Annotated[
    Annotated[TinyModel, Tag("tiny")]
    | Annotated[FolderModel, Tag("path")]
    | Annotated[HubModel, Tag("hub")]
    | Annotated[CustomModel, Tag("custom")]
    | Annotated[RunModel, Tag("run")]
    | Annotated[RegisteredModel, Tag("registered")],
    Discriminator(ByKey(("tiny", "path", "hub", "custom", "run", "registered"))),
]
"""The table of base models: the key in a section `model` selects one of them."""

MODEL_SOURCES: Final = variants(ModelConfig)
"""Key → the model of its settings."""
