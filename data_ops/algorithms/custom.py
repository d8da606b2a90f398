"""Data algorithms of a user, by import path (`docs/extending/data_algorithms.md`)."""

from typing import Any, ClassVar

from data_ops.algorithms.named import Named
from data_ops.algorithms.protocols import CURATOR, FILTER, PAGE, SAMPLER, Curate, Filter, Sample
from storage.errors import ConfigError
from storage.import_path import PluginKind, construct, find_class, foreign_code


class CustomAlgorithm(Named):
    """`my_package.my_module:Name`, or `{name: "my_package.my_module:Name", args: {limit: 0.9}}`."""

    kind: ClassVar[PluginKind]
    name: str
    """Import path of the class."""
    args: dict[str, Any] = {}
    """Passed to its constructor."""

    def find(self) -> Any:
        """Import the class and check it without making an object.

        Raises ConfigError when it is not one of its kind, or takes other arguments than `args`.
        """
        return find_class(self.name, self.kind, self.args)

    def build(self, key: str) -> Any:
        """Import the class and make an object of it.

        Raises ConfigError, beginning with the recipe's `key`, where that is impossible.
        """
        return construct(self.find, self.name, self.args, (key, key))


class CustomCurator(CustomAlgorithm):
    """A curator by import path."""

    kind: ClassVar[PluginKind] = CURATOR

    def make(self, key: str) -> Curate:
        """Return the curator. ConfigError, beginning with `key`, where that is impossible."""
        curator: Curate = self.build(key)
        with foreign_code(f"{key}: needs_shards of {self.name}"):
            is_known = hasattr(curator, "needs_shards")
        if not is_known:
            raise ConfigError(f"{key}: {self.name} has no needs_shards; see {PAGE}")
        return curator


class CustomFilter(CustomAlgorithm):
    """A filter by import path."""

    kind: ClassVar[PluginKind] = FILTER

    def make(self, key: str) -> Filter:
        """Return the filter. ConfigError, beginning with `key`, where that is impossible."""
        algorithm: Filter = self.build(key)
        return algorithm


class CustomSampler(CustomAlgorithm):
    """A sampler by import path."""

    kind: ClassVar[PluginKind] = SAMPLER

    def make(self, key: str) -> Sample:
        """Return the sampler. ConfigError, beginning with `key`, where that is impossible."""
        sampler: Sample = self.build(key)
        return sampler
