"""Backend on an S3 bucket, or a compatible store, through s3fs.

Put-if-absent is one plain PUT with `If-None-Match: *`. The exclusive writes of s3fs are not used:
an exclusive `open` can truncate an existing object, and large writes become multipart uploads whose
condition some servers ignore.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from storage.errors import AstraFlowError, ConfigError, ConflictError, NotFoundError
from storage.store.backend import Keys, check_size
from storage.store.s3_errors import network_errors, status_of, translated
from storage.store.s3_url import S3Location, is_endpoint

CREATE_BYTES_MAX = 5 * 2**30
"""S3's limit of a single PUT."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Maximum silence of a server during an answer."""
ANSWER_TIMEOUT_S = 300.0
"""Of an answer without an object's bytes, which has a megabyte at most."""
SLOWEST_BYTES_S = 10_000
"""Bytes a second below which an object's bytes count as not sent."""
CONNECTIONS_MAX = 64
PAGE_KEYS_MAX = 1000
"""Keys in one response of a listing: S3's limit."""

LISTED_CHARACTERS_MAX = 2**28
"""Of all keys of a listing, which are kept in memory: two million of usual length."""
KEY_CHARACTERS = 60
"""Counted for each key beside its own, as memory."""
PAGE_CHARACTERS = 2**16
"""Counted for each page at least: pages without keys would have no end."""

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""In botocore's order."""


class Listed(NamedTuple):
    """One object of a listing."""

    key: str
    num_bytes: int
    modified_s: float
    """Unix time; S3 has whole seconds."""
    etag: str
    """Changes with the bytes."""


ListedPage: TypeAlias = list[Listed]


class S3Objects:
    """A `Backend` below `s3://bucket/root`.

    Endpoint, region and credentials that `location` does not have come from `AWS_…` variables or
    `~/.aws`.
    """

    def __init__(self, location: S3Location) -> None:
        self.location = location
        self.bucket = location.bucket
        self.root = f"{location.root}/" if location.root else ""
        self._lock = threading.Lock()
        self._filesystem: tuple[int, Any] | None = None
        """Process id and the s3fs instance of this process."""

    def read(self, key: str) -> bytes:
        from fsspec.asyn import sync

        async def get(filesystem: Any) -> bytes:
            """Send one GET; the size in the header is checked before the body is received."""
            response = await filesystem._call_s3(
                "get_object", Bucket=self.bucket, Key=self.root + key
            )
            try:
                check_size(key, response["ContentLength"], self._name(key))
                body = response["Body"].read()
                return bytes(await asyncio.wait_for(body, _time_s(response["ContentLength"])))
            finally:
                response["Body"].close()

        with self._translated(key):
            filesystem = self._fs()
            body: bytes = sync(filesystem.loop, get, filesystem)
            return body

    def read_part(self, key: str, start: int, end: int) -> bytes:
        with self._translated(key):
            try:
                return bytes(
                    self._fs().cat_file(f"{self.bucket}/{self.root}{key}", start=start, end=end)
                )
            except OSError as error:
                if status_of(error) == 416:  # the object ends before `start`
                    return b""
                raise

    def create(self, key: str, body: bytes) -> bool:
        if len(body) >= CREATE_BYTES_MAX:
            raise ConfigError(
                f"{self._name(key)} has {len(body)} bytes; a commit to S3 is one PUT of less than "
                "5 GiB"
            )
        with self._translated(key):
            try:
                self._call(
                    "put_object",
                    timeout_s=_time_s(len(body)),
                    Key=self.root + key,
                    Body=bytes(body),
                    IfNoneMatch="*",
                )
            except OSError as error:
                # The status is reliable; s3fs raises FileExistsError only if the server names the
                # failed condition.
                if status_of(error) == 412:
                    return False
                raise
        return True

    def write(self, key: str, body: bytes) -> None:
        with self._translated(key):
            self._fs().pipe_file(f"{self.bucket}/{self.root}{key}", bytes(body))

    def exists(self, key: str) -> bool:
        try:
            with self._translated(key):
                self._call("head_object", Key=self.root + key)
        except NotFoundError:
            return False
        return True

    def list(self, prefix: str, start_after: str) -> Keys:
        after = {"StartAfter": self.root + start_after} if start_after else {}
        return [key[len(self.root) :] for key in self._listed(prefix, "Contents", "Key", **after)]

    def folders(self, prefix: str) -> Keys:
        paths = self._listed(prefix, "CommonPrefixes", "Prefix", Delimiter="/")
        return [path[len(self.root + prefix) :].rstrip("/") for path in paths]

    def delete(self, key: str) -> None:
        with self._translated(key):
            self._call("delete_object", Key=self.root + key)

    def list_page(self, prefix: str, token: str) -> tuple[ListedPage, str]:
        """List up to PAGE_KEYS_MAX objects whose keys begin with `prefix`.

        Args:
            token: that of the page before; empty for the first page.

        Returns:
            The objects, sorted by key, and the token of the next page; empty for none.
        """
        options: dict[str, Any] = {"ContinuationToken": token} if token else {}
        with self._translated(prefix):
            page = self._call(
                "list_objects_v2", Prefix=self.root + prefix, MaxKeys=PAGE_KEYS_MAX, **options
            )
        listed = [
            Listed(
                entry["Key"][len(self.root) :],
                int(entry["Size"]),
                entry["LastModified"].timestamp(),
                entry["ETag"],
            )
            for entry in page.get("Contents", ())
        ]
        return listed, str(page.get("NextContinuationToken", ""))

    def read_version(self, key: str, etag: str, start: int, end: int) -> bytes:
        """Read the bytes from `start` to `end` of the object if it still has the ETag `etag`.

        Raises ConflictError when it has another one.
        """
        from fsspec.asyn import sync

        async def get(filesystem: Any) -> bytes:
            response = await filesystem._call_s3(
                "get_object",
                Bucket=self.bucket,
                Key=self.root + key,
                IfMatch=etag,
                Range=f"bytes={start}-{end - 1}",
            )
            try:
                return bytes(await response["Body"].read())
            finally:
                response["Body"].close()

        with self._translated(key):
            filesystem = self._fs()
            try:
                body: bytes = sync(filesystem.loop, get, filesystem)
            except OSError as error:
                if status_of(error) == 412:
                    raise ConflictError(f"{self._name(key)} was replaced") from error
                raise
            return body

    def _listed(self, prefix: str, entries: str, name: str, **options: Any) -> Keys:
        """Return the `name` of all `entries` of a listing.

        Raises ConfigError for a server whose pages do not go on, or have no end.
        """
        listed: list[str] = []
        num_characters, token = 0, ""
        with self._translated(prefix):
            while True:
                page = self._call(
                    "list_objects_v2",
                    Prefix=self.root + prefix,
                    MaxKeys=PAGE_KEYS_MAX,
                    **options,
                )
                found = [entry[name] for entry in page.get(entries, ())]
                num_characters += max(
                    PAGE_CHARACTERS, sum(map(len, found)) + KEY_CHARACTERS * len(found)
                )
                listed += found
                if not page.get("IsTruncated"):
                    return listed
                before, token = token, str(page.get("NextContinuationToken", ""))
                if token in ("", before) or num_characters > LISTED_CHARACTERS_MAX:
                    raise ConfigError(
                        f"{self._name(prefix)} cannot be listed: its pages repeat or have no end; "
                        "use a server that lists as S3 does"
                    )
                options["ContinuationToken"] = token

    def _call(self, method: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        from fsspec.asyn import sync

        filesystem = self._fs()
        return sync(
            filesystem.loop,
            filesystem._call_s3,
            method,
            timeout=timeout_s,
            Bucket=self.bucket,
            **arguments,
        )

    def _fs(self) -> Any:
        """Return the s3fs instance of this process.

        Its event loop does not survive a fork, and fsspec's own cache would make one for each
        thread.
        """
        with self._lock:
            if self._filesystem is None or self._filesystem[0] != os.getpid():
                self._filesystem = (os.getpid(), _open(self.location))
            return self._filesystem[1]

    def _name(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.root}{key}{self.location.at_endpoint}"

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Translate exceptions of s3fs, botocore and the network into `storage.errors`."""
        try:
            yield
        except AstraFlowError:
            raise
        except network_errors() as error:
            raise translated(error, self.location, self._name(key)) from error


def _time_s(num_bytes: int) -> float:
    """Return the time within which an object of this size is sent."""
    return ANSWER_TIMEOUT_S + num_bytes / SLOWEST_BYTES_S


def _open(location: S3Location) -> Any:
    """Make the s3fs instance of a location; it does not retry and does not cache listings."""
    try:
        import s3fs
    except ImportError as error:
        raise ConfigError("a store on S3 needs the package s3fs; install astraflow[s3]") from error
    settings = _profile_settings(location.profile)
    _check_settings(location, settings)
    logging.getLogger("botocore.credentials").setLevel(logging.CRITICAL)  # its errors are raised
    # The listings cache would hide objects of other writers.
    filesystem = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        default_fill_cache=False,
        profile=location.profile or None,
        endpoint_url=location.endpoint or settings.get("endpoint_url"),
        client_kwargs={"region_name": settings["region"]} if "region" in settings else {},
        config_kwargs={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": CONNECTIONS_MAX,
            "retries": {"total_max_attempts": 1},
        },
    )
    filesystem.retries = 1  # `ObjectStore` retries
    return filesystem


def _check_settings(location: S3Location, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError where the address of the server, from wherever it comes, is not one, and
    where its certificates are missing.
    """
    given = {f"endpoint_url of the profile {location.profile}": settings.get("endpoint_url")}
    given |= {name: os.environ.get(name) for name in ENDPOINT_VARIABLES}
    source, endpoint = next(((name, url) for name, url in given.items() if url), ("", ""))
    if not location.endpoint and source and not is_endpoint(endpoint):
        raise ConfigError(
            f"{source} must look like https://host or http://host:9000, without a user or a "
            "password; correct it or unset it"
        )
    bundle = os.environ.get("AWS_CA_BUNDLE") or settings.get("ca_bundle")
    if bundle and not os.path.exists(bundle):
        raise ConfigError(
            f"there is no file {bundle}, which AWS_CA_BUNDLE, or ca_bundle of the profile "
            f"{location.profile or 'default'}, names as the certificates of the server"
        )


def _profile_settings(profile: str) -> dict[str, Any]:
    """Read the settings of a profile from `~/.aws/config`.

    botocore would prefer AWS_ENDPOINT_URL and AWS_DEFAULT_REGION, which belong to the home store.
    """
    from botocore.session import Session

    return Session(profile=profile).get_scoped_config() if profile else {}
