"""What the URL of a store on S3 says: `s3://bucket/prefix?endpoint=https://host&profile=eu`.

A URL is stored with runs, shown on pages and logged, so it never holds a credential. One that does
is refused, and what looks like a credential is not repeated.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlencode, urlsplit

from storage.errors import ConfigError

_NAME = re.compile(r"[A-Za-z][A-Za-z_-]{0,30}")
_HINT = "credentials stand in AWS_… variables or in a profile of ~/.aws, never in a URL"


@dataclass(frozen=True)
class S3Location:
    """Example: `S3Location("bucket", "prefix", "https://host", "eu")`."""

    bucket: str
    root: str = ""
    """Without slashes at its ends; empty for the whole bucket."""
    endpoint: str = ""
    """The server, instead of the one that AWS_ENDPOINT_URL names."""
    profile: str = ""
    """Of `~/.aws/config` and `~/.aws/credentials`, instead of the AWS_… variables."""

    @property
    def url(self) -> str:
        """Of the place alone: keys may be appended."""
        return f"s3://{self.bucket}/{self.root}".rstrip("/")

    @property
    def query(self) -> str:
        """How the place is reached; empty where the environment says it all."""
        named = {"endpoint": self.endpoint, "profile": self.profile}
        return urlencode(
            {name: value for name, value in named.items() if value}, safe=":/", quote_via=quote
        )

    @property
    def at_endpoint(self) -> str:
        """Where the server is, in words; empty where the environment says it."""
        return f" at {self.endpoint}" if self.endpoint else ""

    @property
    def credentials(self) -> str:
        """Where they come from, in words."""
        return f"the profile {self.profile} in ~/.aws" if self.profile else "the AWS_… variables"


def parse(url: str) -> S3Location:
    """ConfigError for a URL without a bucket, with credentials, or with parameters other than
    `endpoint` and `profile`.
    """
    place, _, query = url.removeprefix("s3://").partition("?")
    bucket, _, root = place.partition("/")
    if not bucket:
        raise ConfigError("the store URL s3://… names no bucket; write s3://bucket/prefix")
    if "@" in bucket or ":" in bucket:
        shown = f"…@{place.rpartition('@')[2]}" if "@" in place else "…"
        raise ConfigError(
            f"the store URL s3://{shown} has more than a bucket's name before its first slash; "
            f"{_HINT}"
        )
    named = S3Location(bucket, root.strip("/"))
    given = _parameters(named.url, query)
    return S3Location(
        named.bucket, named.root, _endpoint(named.url, given), given.get("profile", "")
    )


def _parameters(url: str, query: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in ("endpoint", "profile"):
            shown = f" {name}" if _NAME.fullmatch(name) and value else ""
            raise ConfigError(
                f"the store URL {url} has an unknown parameter{shown}; it takes endpoint and "
                f"profile; {_HINT}"
            )
        if not value or name in given:
            raise ConfigError(
                f"the store URL {url} needs one value for its parameter {name}; write {name}=VALUE "
                "once"
            )
        given[name] = unquote(value)
    return given


def _endpoint(url: str, given: dict[str, str]) -> str:
    endpoint = given.get("endpoint", "").rstrip("/")
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        sound = False
    if not sound or "@" in endpoint or parts.query or parts.fragment:
        raise ConfigError(
            f"the endpoint of the store URL {url} must look like https://host or http://host:9000; "
            f"{_HINT}"
        )
    return endpoint
