"""Errors of s3fs, botocore and the network as those of `storage.errors`."""

from typing import Any

from storage.errors import AstraFlowError, ConfigError, NotFoundError, TransientError
from storage.store.s3_url import S3Location

_TRANSIENT_STATUSES = {408, 409, 412, 425, 429}
_TRANSIENT_CODES = {
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
"""Error codes with status 400 or 403 after which a retry may succeed."""


def translated(error: Exception, location: S3Location, name: str) -> AstraFlowError:
    """Return the error of `storage.errors` for a failed request for the object `name`."""
    status, code = status_of(error), _code(error)
    if code == "NoSuchBucket":
        return ConfigError(
            f"the bucket {location.bucket}{location.at_endpoint} does not exist; create it, or "
            "correct the store's URL"
        )
    file = _missing_file(error) if status is None else ""
    if status == 404 or (isinstance(error, FileNotFoundError) and not file):
        return NotFoundError(f"there is no object {name}")
    if file:
        return ConfigError(
            f"{name} cannot be reached: there is no file {file}; correct {location.credentials}"
        )
    if _needs_person(error):
        return ConfigError(f"{name} cannot be reached: {error}; correct {location.credentials}")
    if status is None or status >= 500 or status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES:
        return TransientError(f"a request for {name} failed: {type(error).__name__}: {error}")
    if status in (401, 403):
        return ConfigError(
            f"access to {name} is denied ({code}); check {location.credentials} and the bucket's "
            "policy"
        )
    return ConfigError(f"the store rejected {name} with status {status} ({code}): {error}")


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the server's response; None where there was no response."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def network_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of s3fs, and those of connections that it does not translate."""
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, ClientError, ValueError)  # ValueError: of an endpoint


def _missing_file(error: BaseException | None) -> str:
    """Return the local file that a request needed and that does not exist, such as that of a web
    identity token; empty without one.

    s3fs raises FileNotFoundError also where the server has no such object; then it names no file.
    """
    while error is not None:
        if isinstance(error, FileNotFoundError) and error.filename:
            return str(error.filename)
        error = error.__cause__ or error.__context__
    return ""


def _response(error: BaseException | None) -> dict[str, Any]:
    """Return the server's response from the chain of causes; empty without one."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _needs_person(error: BaseException) -> bool:
    """Return whether no request was sent, because of wrong settings that a person must correct."""
    from botocore import exceptions

    kinds = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.ParamValidationError,
        exceptions.ProfileNotFound,
        exceptions.NoRegionError,
        exceptions.ConfigNotFound,
        exceptions.ConfigParseError,
        exceptions.InvalidConfigError,
        exceptions.InvalidChecksumConfigError,
        exceptions.InvalidDefaultsMode,
        exceptions.InvalidIMDSEndpointError,
        exceptions.InvalidIMDSEndpointModeError,
        exceptions.InvalidProxiesConfigError,
        exceptions.InvalidRetryConfigurationError,
        exceptions.InvalidS3AddressingStyleError,
        exceptions.InvalidS3UsEast1RegionalEndpointConfigError,
        exceptions.InvalidSTSRegionalEndpointsConfigError,
        exceptions.UnsupportedS3ConfigurationError,
        ValueError,
    )
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)
