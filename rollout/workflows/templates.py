"""Message templates of workflows: text with placeholders such as `{question}`."""

from collections.abc import Sequence
from string import Formatter

from storage.errors import ConfigError


def checked_template(name: str, template: str, placeholders: Sequence[str]) -> str:
    """Return `template`; ConfigError if it is malformed or has other than these placeholders.

    Args:
        name: the argument of the workflow that has the template.
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"rollout.workflow.args.{name} is no template: {error}; write a brace itself as {{{{ "
            f"or }}}}"
        ) from error
    for field in fields:
        if field not in placeholders:
            allowed = " and ".join(f"{{{placeholder}}}" for placeholder in placeholders)
            raise ConfigError(
                f"rollout.workflow.args.{name} has a placeholder {{{field}}}; it may have "
                f"{allowed}; write a brace itself as {{{{ or }}}}"
            )
    return template
