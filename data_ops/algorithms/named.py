"""The base class of settings that a name selects, written alone or in a section."""

from typing import Any

from pydantic import model_validator

from storage.config_model import Frozen


class Named(Frozen):
    """Written `zero_advantage`, or `{name: zero_advantage}` with further settings."""

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
