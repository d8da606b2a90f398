"""URLs of stores on S3: `s3://bucket/prefix?endpoint=https://host&profile=eu`.

A URL is stored with runs, shown on pages and logged. One with a credential is rejected, and the
error does not repeat what looks like a credential.
"""

import re
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote, urlencode, urlsplit

from storage.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z_-]{0,30}")
_HINT = "credentials belong in AWS_… variables or in a profile of ~/.aws, never in a URL"


@dataclass(frozen=True)
class S3Location:
    """The parts of a URL. Example: `S3Location("bucket", "prefix", "https://host", "eu")`."""

    bucket: str
    root: str = ""
    """Prefix without slashes at its ends; empty for the whole bucket."""
    endpoint: str = ""
    """Address of the server; empty for that of AWS_ENDPOINT_URL."""
    profile: str = ""
    """Profile of `~/.aws/config` and `~/.aws/credentials`; empty for the AWS_… variables."""

    @property
    def url(self) -> str:
        """The URL without query: keys may be appended."""
        return f"s3://{self.bucket}/{self.root}".rstrip("/")

    @property
    def query(self) -> str:
        """The query of the URL; empty where the environment has endpoint and credentials."""
        parameters = {"endpoint": self.endpoint, "profile": self.profile}
        return urlencode(
            {name: value for name, value in parameters.items() if value}, safe=":/", quote_via=quote
        )

    @property
    def at_endpoint(self) -> str:
        """` at ENDPOINT`, for messages; empty without an endpoint."""
        return f" at {self.endpoint}" if self.endpoint else ""

    @property
    def credentials(self) -> str:
        """Where the credentials come from, for messages."""
        return f"the profile {self.profile} in ~/.aws" if self.profile else "the AWS_… variables"


def parse(url: str) -> S3Location:
    """Parse the URL of a store on S3.

    Raises ConfigError for a URL without a bucket, with credentials, or with parameters other than
    `endpoint` and `profile`.
    """
    path, _, query = url.removeprefix("s3://").partition("?")
    bucket, _, root = path.partition("/")
    if not bucket:
        raise ConfigError("the store URL s3://… has no bucket; write s3://bucket/prefix")
    if "@" in bucket or ":" in bucket:
        shown = f"…@{path.rpartition('@')[2]}" if "@" in path else "…"
        raise ConfigError(
            f"the store URL s3://{shown} has more than a bucket's name before its first slash; "
            f"{_HINT}"
        )
    location = S3Location(bucket, root.strip("/"))
    parameters = _parameters(location.url, query)
    return replace(
        location,
        endpoint=_endpoint(location.url, parameters),
        profile=parameters.get("profile", ""),
    )


def _parameters(url: str, query: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in ("endpoint", "profile"):
            shown = f" {name}" if _NAME.fullmatch(name) and value else ""
            raise ConfigError(
                f"the store URL {url} has an unknown parameter{shown}; it takes endpoint and "
                f"profile; {_HINT}"
            )
        if not value or name in parameters:
            raise ConfigError(
                f"the store URL {url} needs one value for its parameter {name}; write {name}=VALUE "
                "once"
            )
        parameters[name] = unquote(value)
    return parameters


def _endpoint(url: str, parameters: dict[str, str]) -> str:
    endpoint = parameters.get("endpoint", "").rstrip("/")
    if not endpoint:
        return ""
    if not is_endpoint(endpoint):
        raise ConfigError(
            f"the endpoint of the store URL {url} must look like https://host or http://host:9000; "
            f"{_HINT}"
        )
    return endpoint


def is_endpoint(address: str) -> bool:
    """Return whether an address can be that of an S3 server, without credentials in it."""
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        return False
    return bool(is_valid) and "@" not in address and not parts.query and not parts.fragment
