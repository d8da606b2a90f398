"""What a recipe says about the base model of a policy."""

from pydantic import model_validator

from storage.config_model import Count, CountOrNone, Frozen, Layers, Seed, Width


class TinyBase(Frozen):
    """The embedded base model: a small Qwen3 architecture, warmed up on chained addition when it is first needed."""

    hidden: Width = 64
    layers: Layers = 2
    heads: Layers = 4
    kv_heads: Layers = 2
    head_dim: Width = 16
    intermediate: Width = 192
    skill_iterations: CountOrNone = 560
    """Supervised iterations that teach the skill."""
    habit_iterations: CountOrNone = 60
    """Supervised iterations that hide the skill under bad habits, so that RL has something to find."""
    batch_size: Count = 64
    seed: Seed = 0


class ModelConfig(Frozen):
    """Where a policy's version 0 comes from: exactly one of `tiny`, `path` and `hub`."""

    tiny: TinyBase | None = None
    path: str | None = None
    """A folder that `AutoModelForCausalLM.from_pretrained` loads."""
    hub: str | None = None
    """A model of the Hugging Face hub, such as `Qwen/Qwen3-1.7B`."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        named = [key for key in ("tiny", "path", "hub") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"model needs exactly one of tiny, path and hub; found {' and '.join(named) or 'none'}")
        return self
