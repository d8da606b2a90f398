"""Message templates of workflows: text with placeholders such as `{question}`."""

from collections.abc import Sequence
from string import Formatter

from storage.errors import ConfigError

PLACEHOLDERS_MAX = 16
"""Placeholders in one template: each is replaced by a question or an answer."""


def checked_template(name: str, template: str, placeholders: Sequence[str]) -> str:
    """Return `template`; ConfigError if it is malformed, or has other placeholders than these or
    more than PLACEHOLDERS_MAX.

    A placeholder has no format: `{question:1000000000}` would be a text of a gigabyte.

    Args:
        name: the argument of the workflow that has the template.
    """
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ConfigError(
            f"rollout.workflow.args.{name} is no template: {error}; write a brace itself as {{{{ "
            f"or }}}}"
        ) from error
    if len(parts) > PLACEHOLDERS_MAX:
        raise ConfigError(
            f"rollout.workflow.args.{name} has {len(parts):,} placeholders; it may have at most "
            f"{PLACEHOLDERS_MAX}"
        )
    for _, field, form, conversion in parts:
        if field in placeholders and (form or conversion):
            raise ConfigError(
                f"rollout.workflow.args.{name} has a placeholder {{{field}}} with a format; leave "
                "out what follows its name"
            )
        if field not in placeholders:
            allowed = " and ".join(f"{{{placeholder}}}" for placeholder in placeholders)
            raise ConfigError(
                f"rollout.workflow.args.{name} has a placeholder {{{field}}}; it may have "
                f"{allowed}; write a brace itself as {{{{ or }}}}"
            )
    return template
