"""What servers shall hold: weights, and for each policy an adapter of them.

one policy, merged weights     version 7: its tensors
one policy, adapters           version 0: its base;  the policy: A and B of version 7
several policies               version 0: the base of all;  each policy: A and B of its version
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rollout.engines.sglang.weights.adapters import split
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, StoredAdapter

Tensors = Mapping[str, HostTensor]


@dataclass(frozen=True, eq=False)
class PolicyAdapter:
    """What samples the requests of one policy, beside the weights of the server."""

    version: int
    form: StoredAdapter | None = None
    """None: the weights of the server alone sample them."""
    tensors: Tensors = field(default_factory=dict)
    """A and B."""
    base: Tensors = field(default_factory=dict)
    """W as this policy was given them. Their bits are those of the weights of the server."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What each server of a group shall hold. Example: `Wanted(0, base, {"3f9c21aa": adapter})`."""

    version: int
    """Number in the server's name of its weights. Of equal numbers, the weights have equal bits."""
    tensors: Tensors
    """Its weights, as they were given last: the memory of older versions is used again."""
    adapters: Mapping[str, PolicyAdapter] = field(default_factory=dict)
    """Id of an engine → adapter. Requests of an engine without one are sampled by the weights, of
    which each token has the version.
    """

    def of_one_policy(
        self, engine: str, version: int, tensors: Tensors, form: StoredAdapter | None
    ) -> "Wanted":
        """Return what servers of one policy must hold with its next version."""
        if form is None:
            return Wanted(version, tensors)
        base, own = split(tensors)
        held = self.tensors.keys() == base.keys() and all(
            self.tensors[name] is base[name] for name in base
        )
        number = self.version if held else version
        return Wanted(number, base, {engine: PolicyAdapter(version, form, own, base)})

    def of_several_policies(
        self, engine: str, version: int, tensors: Tensors, form: StoredAdapter | None
    ) -> "Wanted":
        """Return what policies that share a server want with the next version of one.

        Raises:
            ConfigError: its base model is not that of the others.
        """
        base, own = split(tensors)
        before = self.adapters.get(engine)
        held = before.base if before else self.tensors
        if held and (differing := different(held, base)):
            raise ConfigError(
                "rollout.engine.sglang.shared: the policies of a worker do not have one base model "
                f"({len(differing)} tensors differ, {differing[0]} among them); give them the same "
                "model and publish adapters, or leave shared out"
            )
        adapter = PolicyAdapter(version, form, own, base)
        return Wanted(0, base, {**self.adapters, engine: adapter})

    def of(self, engines: Collection[str]) -> "Wanted":
        """Return what these engines want of it."""
        kept = {engine: self.adapters[engine] for engine in self.adapters if engine in engines}
        return Wanted(self.version, self.tensors, kept)


def different(one: Tensors, other: Tensors) -> list[str]:
    """Return the names of tensors that have other bits, or that one of them lacks."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if one.get(name) is not other.get(name)
        and (name not in one or name not in other or _digest(one[name]) != _digest(other[name]))
    )


def _digest(tensor: HostTensor) -> str:
    return weights_digest({"": tensor})
