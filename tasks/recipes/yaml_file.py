"""YAML as plain data with the line of every key, within limits of size, nesting and aliases.

A YAML text of a few lines can expand to a billion values (`b: [*a, *a, …]`, level upon level), be
nested deeper than any parser can read, or have tags that do not fit their values. Each of these is
a ConfigError with the name of the text and, where possible, the line.
"""

import re
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml

from storage.errors import ConfigError

KeyPath: TypeAlias = tuple[str, ...]
NESTING_MAX = 32
BYTES_MAX = 200_000
VALUES_MAX = 10_000
"""Keys and list items of one text, with the repetitions by aliases."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """Loader of safe YAML with the plain values of YAML 1.2, and keys as they are written.

    `5e-5` is a number, which YAML 1.1 reads as text; `010`, `1:30`, `no`, `2024-01-01` and `=` are
    text, which YAML 1.1 reads as 8, 90, false, a date and a default value. A key is always text:
    the name of a region or a policy may be `no` or `1`.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in ("float", "int", "bool", "timestamp", "value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?((\.\d+|\d+\.\d*)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(true|True|TRUE|false|False|FALSE)$"),
    list("tTfF"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    value = int(loader.construct_yaml_int(node))
    str(value)  # ValueError for one of base 16 with too many digits, as for one of base 10
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


class _Dumper(yaml.SafeDumper):
    """Dumper whose text `_Loader` reads back unchanged."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


class Document(NamedTuple):
    """A text's value and the line (from 1) of every key; the key of a list item is its index."""

    value: Any
    lines: dict[KeyPath, int]
    first_line: int = 1
    """Where the value begins."""


def read(text: str, name: str) -> Document:
    """Read the only document of a text; the value of an empty text is None.

    Raises ConfigError, whose message begins with `name`.
    """
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise ConfigError(
            f"{name}: larger than {BYTES_MAX:,} bytes; a recipe is a page of settings"
        )
    if match := _CONTROL.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ConfigError(
            f"{name}, line {line}: not valid YAML: the character U+{ord(match[0]):04X} cannot "
            "stand in a text; remove it"
        )
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {})
        lines = {}
        for count, (path, line) in enumerate(_walk(node, (), name), start=1):
            if count > VALUES_MAX:
                raise ConfigError(
                    f"{name}, line {line}: more than {VALUES_MAX:,} values; do its aliases (*) "
                    "multiply them?"
                )
            lines[path] = line
        value = _unshared(loader.construct_document(node))
        return Document(value, lines, node.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark or error.problem_mark  # the context is the start of the construct
        raise ConfigError(
            f"{name}, line {mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than {NESTING_MAX} sections") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # PyYAML's constructors raise these for a value that does not fit its tag: `2001-99-99`,
        # `!!bool maybe`, 5,000 digits
        raise ConfigError(
            f"{name}: not valid YAML: a value is not of the type it is written as ({error})"
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def write(value: Any) -> str:
    """Write a value as YAML text that `read` reads back unchanged."""
    return str(yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


def _unshared(value: Any) -> Any:
    """Copy a value so that no section is in two places, as YAML's aliases have it: a change in one
    place must not change the other.
    """
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _walk(node: yaml.Node, path: KeyPath, name: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield every key path of a composed document with its line (from 1)."""
    if len(path) > NESTING_MAX:  # an anchor that contains itself has no end
        raise ConfigError(
            f"{name}, line {node.start_mark.line + 1}: nested deeper than {NESTING_MAX} sections"
        )
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{name}, line {line}: a key is one word, not a list or a section"
                )
            if key.value in lines and key.value != "<<":
                raise ConfigError(
                    f"{name}, line {line}: {'.'.join((*path, key.value))}: written twice (first on "
                    "line "
                    f"{lines[key.value]}); keep one"
                )
            lines[key.value] = line
            yield (*path, key.value), line
            yield from _walk(value, (*path, key.value), name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _walk(item, (*path, str(index)), name)
