"""Objects of an S3 bucket (or a compatible store) through s3fs. Knows nothing of runs.

Put-if-absent is one plain PUT with `If-None-Match: *`. s3fs's own ways to write exclusively are not
used: an exclusive `open` can truncate a standing object, and large writes become multipart uploads
whose condition some servers ignore.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from storage.errors import AstraFlowError, ConfigError, NotFoundError, TransientError
from storage.store.backend import Keys, check_size
from storage.store.s3_url import S3Location

CREATE_BYTES_MAX = 5 * 2**30
"""S3's bound of a single PUT."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
CONNECTIONS_MAX = 64
PAGE_KEYS_MAX = 1000
"""Keys in one answer of a listing; S3 gives no more."""

Pages: TypeAlias = list[dict[str, Any]]

_TRANSIENT_STATUSES = {408, 409, 412, 425, 429}
_TRANSIENT_CODES = {
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
"""Error codes that arrive with status 400 or 403 and yet go away by themselves."""


class S3Objects:
    """A `Backend` below `s3://bucket/root`. What `place` does not name comes from `AWS_…` variables
    or `~/.aws`.
    """

    def __init__(self, place: S3Location) -> None:
        self.place = place
        self.bucket = place.bucket
        self.root = f"{place.root}/" if place.root else ""
        self._guard = threading.Lock()
        self._opened: tuple[int, Any] | None = None

    def read(self, key: str) -> bytes:
        from fsspec.asyn import sync

        async def get(filesystem: Any) -> bytes:
            """One GET: its answer begins with the size, which is judged before the rest is
            awaited.
            """
            answer = await filesystem._call_s3(
                "get_object", Bucket=self.bucket, Key=self.root + key
            )
            try:
                check_size(key, answer["ContentLength"], self._name(key))
                return bytes(await answer["Body"].read())
            finally:
                answer["Body"].close()

        with self._translated(key):
            filesystem = self._fs()
            return sync(filesystem.loop, get, filesystem)  # type: ignore[no-any-return]  # fsspec has no types

    def read_part(self, key: str, start: int, end: int) -> bytes:
        with self._translated(key):
            try:
                return bytes(
                    self._fs().cat_file(f"{self.bucket}/{self.root}{key}", start=start, end=end)
                )
            except OSError as error:
                if _status(error) == 416:  # the object ends before `start`
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
                self._call("put_object", Key=self.root + key, Body=bytes(body), IfNoneMatch="*")
            except OSError as error:
                # s3fs says FileExistsError only when the server names the failed condition; the
                # status always tells.
                if _status(error) == 412:
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
        pages = self._pages(prefix, **after)
        return [
            entry["Key"][len(self.root) :] for page in pages for entry in page.get("Contents", ())
        ]

    def folders(self, prefix: str) -> Keys:
        pages = self._pages(prefix, Delimiter="/")
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())]
        return [name[len(self.root + prefix) :].rstrip("/") for name in found]

    def delete(self, key: str) -> None:
        with self._translated(key):
            self._call("delete_object", Key=self.root + key)

    def _pages(self, prefix: str, **options: str) -> Pages:
        pages: Pages = []
        with self._translated(prefix):
            while not pages or pages[-1].get("IsTruncated"):
                if pages:
                    options["ContinuationToken"] = pages[-1]["NextContinuationToken"]
                pages.append(
                    self._call(
                        "list_objects_v2",
                        Prefix=self.root + prefix,
                        MaxKeys=PAGE_KEYS_MAX,
                        **options,
                    )
                )
        return pages

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._fs().call_s3(method, Bucket=self.bucket, **arguments)

    def _fs(self) -> Any:
        """One s3fs instance a process: its loop does not survive a fork, and fsspec's cache keeps
        one a thread.
        """
        with self._guard:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = (os.getpid(), _open(self.place))
            return self._opened[1]

    def _name(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.root}{key}{self.place.at_endpoint}"

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turns what s3fs, botocore or the network said about `key` into the project's error."""
        try:
            yield
        except AstraFlowError:
            raise
        except _network_errors() as error:
            raise _sorted(error, self.place, self._name(key)) from error


def _sorted(error: Exception, place: S3Location, name: str) -> AstraFlowError:
    """What the failure of a request for the object `name` means."""
    status, code = _status(error), _code(error)
    if code == "NoSuchBucket":
        return ConfigError(
            f"the bucket {place.bucket}{place.at_endpoint} does not exist; create it, or correct "
            "the store's URL"
        )
    if status == 404 or isinstance(error, FileNotFoundError):
        return NotFoundError(f"there is no object {name}")
    if _needs_person(error):
        return ConfigError(f"{name} cannot be reached: {error}; correct {place.credentials}")
    if status is None or status >= 500 or status in _TRANSIENT_STATUSES or code in _TRANSIENT_CODES:
        return TransientError(
            f"{name} did not answer as it should: {type(error).__name__}: {error}"
        )
    if status in (401, 403):
        return ConfigError(
            f"access to {name} is denied ({code}); check {place.credentials} and the bucket's "
            "policy"
        )
    return ConfigError(f"the store refused {name} with status {status} ({code}): {error}")


def _open(place: S3Location) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise ConfigError("a store on S3 needs the package s3fs; install astraflow[s3]") from error
    own = _of_profile(place.profile)
    # The listings cache would hide what other writers made.
    filesystem = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        default_fill_cache=False,
        profile=place.profile or None,
        endpoint_url=place.endpoint or own.get("endpoint_url"),
        client_kwargs={"region_name": own["region"]} if "region" in own else {},
        config_kwargs={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": CONNECTIONS_MAX,
            "retries": {"total_max_attempts": 1},
        },
    )
    filesystem.retries = 1  # tries are counted in one place, `ObjectStore`
    return filesystem


def _of_profile(profile: str) -> dict[str, Any]:
    """What `~/.aws/config` says of a profile. botocore would let AWS_ENDPOINT_URL and
    AWS_DEFAULT_REGION, which are the home store's, win over it.
    """
    from botocore.session import Session

    return Session(profile=profile).get_scoped_config() if profile else {}


def _response(error: BaseException | None) -> dict[str, Any]:
    """The server's answer, wherever in the chain of causes botocore left it; empty when there was
    none.
    """
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}


def _status(error: BaseException) -> int | None:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _network_errors() -> tuple[type[Exception], ...]:
    """What s3fs raises, and what escapes it untranslated: failed connections, and bodies that end
    too early.
    """
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, ClientError)


def _needs_person(error: BaseException) -> bool:
    """Failures before any request was sent, which no retry mends."""
    from botocore import exceptions

    kinds = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.ParamValidationError,
        exceptions.ProfileNotFound,
        exceptions.NoRegionError,
    )
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)
