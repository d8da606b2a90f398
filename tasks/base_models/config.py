"""Settings of the sources of base models, and the table of them.

Importing this module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeAlias

from pydantic import Discriminator, Tag

from storage.config_model import Count, CountOrNone, Frozen, Layers, Seed, Width
from storage.config_union import ByKey, variants
from storage.errors import ConfigError
from storage.import_path import PluginKind, constructor_fault, resolve
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from tasks.base_models.folders import Progress, read_model_folder, snapshot

ModelFiles: TypeAlias = tuple[Mapping[str, HostTensor], Mapping[str, bytes]]
"""Tensors and other files of a model, by name."""


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
    batch_size: Count = 64
    seed: Seed = 0


class TinyModel(Frozen):
    """`model: {tiny: {}}`."""

    tiny: TinyBase
    """The embedded base model."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Build the model, unless the store has it."""
        from tasks.base_models.publishing import ensure_tiny

        return ensure_tiny(store, self.tiny, progress)


class FolderModel(Frozen):
    """`model: {path: models/mine}`."""

    path: str
    """A folder that `AutoModelForCausalLM.from_pretrained` loads."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Read the folder."""
        return read_model_folder(Path(self.path), progress)


class HubModel(Frozen):
    """`model: {hub: Qwen/Qwen3-1.7B}`."""

    hub: str
    """A model of the Hugging Face hub."""

    def files(self, store: ObjectStore, progress: Progress) -> ModelFiles:
        """Fetch the model into the hub's cache and read it there."""
        return read_model_folder(snapshot(self.hub, progress), progress)


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
        try:
            source: ModelSource = self.find()(**self.args)
        except ConfigError as error:
            raise ConfigError(f"model.custom: {error}") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model.args: {self.custom} refuses {self.args}: {error}") from error
        return source.load(progress)

    def find(self) -> Any:
        """Import the class and check it without building it.

        ConfigError when it is not a base model, or takes other arguments than `args`.
        """
        source_class: Any = resolve(self.custom, {}, MODEL)
        if reason := constructor_fault(source_class, MODEL, self.args):
            raise ConfigError(
                f"{self.custom} does not take args {self.args} ({reason}); correct them"
            )
        return source_class


ModelConfig: TypeAlias = Annotated[
    Annotated[TinyModel, Tag("tiny")]
    | Annotated[FolderModel, Tag("path")]
    | Annotated[HubModel, Tag("hub")]
    | Annotated[CustomModel, Tag("custom")],
    Discriminator(ByKey(("tiny", "path", "hub", "custom"))),
]
"""The table of base models: the key in a section `model` selects one of them."""

MODEL_SOURCES: Final = variants(ModelConfig)
"""Key → the model of its settings."""
