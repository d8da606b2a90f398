"""Message templates of workflows: text with `{question}` and the like, checked when the workflow is
built.
"""

from collections.abc import Sequence
from string import Formatter

from storage.errors import ConfigError


def checked_template(name: str, template: str, places: Sequence[str]) -> str:
    """`template` itself; ConfigError when it is no template, or has a place other than those of
    `places`.
    """
    try:
        found = [place for _, place, _, _ in Formatter().parse(template) if place is not None]
    except ValueError as error:
        raise ConfigError(
            f"rollout.workflow.args.{name} is no template: {error}; write a brace itself as {{{{ "
            f"or }}}}"
        ) from error
    for place in found:
        if place not in places:
            known = " and ".join(f"{{{known}}}" for known in places)
            raise ConfigError(
                f"rollout.workflow.args.{name} has a place {{{place}}}; it may have {known}; "
                "write a brace itself as {{ or }}"
            )
    return template
