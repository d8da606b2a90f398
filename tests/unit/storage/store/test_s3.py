"""Requests to an S3 server and the translation of its responses; the server is a script, s3fs is real."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConfigParseError,
    EndpointConnectionError,
    IncompleteReadError,
    InvalidRetryModeError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)
from fsspec.asyn import get_loop, sync
from s3fs.errors import translate_boto_error

from storage.errors import AstraFlowError, ConfigError, CorruptError, NotFoundError, TransientError
from storage.store import backend, s3
from storage.store.s3 import S3Objects
from storage.store.s3_url import S3Location

PLACE = S3Location("bucket", "root", "http://host:9000", "eu")


def answer(status: int, code: str) -> BaseException:
    """The exception of s3fs for a response of the server."""
    response: Any = {
        "Error": {"Code": code, "Message": "no"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    translated: BaseException = translate_boto_error(ClientError(response, "PutObject"))
    return translated


ENDLESS = object()
"""An answer that never ends."""


class Body:
    """The body of a response whose headers have arrived: the rest comes when it is read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.was_read, self.was_closed = content, False, False

    async def read(self) -> bytes:
        self.was_read = True
        return self.content

    def close(self) -> None:
        self.was_closed = True


class Server:
    """Stands for an s3fs filesystem: returns responses of a script for each call, and records the
    requests.
    """

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.loop = get_loop()
        self.bodies: list[Body] = []

    async def _call_s3(self, method: str, **arguments: Any) -> Any:
        content = self._next(method, arguments)
        if content is ENDLESS:
            await asyncio.Event().wait()
        if not isinstance(content, bytes):
            return content
        self.bodies.append(Body(content))
        return {"ContentLength": len(content), "Body": self.bodies[-1]}

    def cat_file(self, path: str, **arguments: Any) -> Any:
        return self._next("cat_file", {"path": path, **arguments})

    def pipe_file(self, path: str, body: bytes) -> Any:
        return self._next("pipe_file", {"path": path, "body": body})

    def _next(self, method: str, arguments: dict[str, Any]) -> Any:
        self.asked.append((method, arguments))
        said = self.script.pop(0) if self.script else {}
        if isinstance(said, BaseException):
            raise said
        return said


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[S3Objects, Server]]]:
    def make(*script: Any) -> tuple[S3Objects, Server]:
        server = Server(*script)
        monkeypatch.setattr(s3, "_open", lambda place: server)
        return S3Objects(PLACE), server

    return make


SORTED: list[tuple[int, str, type[AstraFlowError]]] = [
    (400, "RequestTimeout", TransientError),
    (400, "IncompleteBody", TransientError),
    (400, "BadDigest", TransientError),
    (400, "Throttling", TransientError),
    (400, "ThrottlingException", TransientError),
    (403, "SlowDown", TransientError),
    (408, "408", TransientError),  # a HEAD request gets no code
    (409, "OperationAborted", TransientError),
    (409, "ConditionalRequestConflict", TransientError),
    (412, "PreconditionFailed", TransientError),
    (425, "TooEarly", TransientError),
    (429, "TooManyRequests", TransientError),
    (500, "InternalError", TransientError),
    (502, "BadGateway", TransientError),
    (503, "SlowDown", TransientError),
    (503, "ServiceUnavailable", TransientError),
    (504, "GatewayTimeout", TransientError),
    (404, "NoSuchKey", NotFoundError),
    (404, "404", NotFoundError),
    (404, "NoSuchBucket", ConfigError),
    (401, "Unauthorized", ConfigError),
    (403, "AccessDenied", ConfigError),
    (403, "SignatureDoesNotMatch", ConfigError),
    (403, "InvalidAccessKeyId", ConfigError),
    (403, "RequestTimeTooSkewed", ConfigError),
    (400, "InvalidArgument", ConfigError),
    (400, "ExpiredToken", ConfigError),
    (301, "PermanentRedirect", ConfigError),
    (405, "MethodNotAllowed", ConfigError),
    (499, "ClientClosed", ConfigError),
]


def test_each_status_and_code_is_retried_missing_or_permanent(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    results = []
    for status, code, _ in SORTED:
        objects, _server = served(answer(status, code))
        with pytest.raises(AstraFlowError) as raised:
            objects.read("a")
        results.append((status, code, raised.type))
    assert results == SORTED


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EndpointConnectionError(endpoint_url="http://host"), TransientError),
        (ReadTimeoutError(endpoint_url="http://host"), TransientError),
        (IncompleteReadError(actual_bytes=1, expected_bytes=2), TransientError),
        (ConnectionResetError("reset"), TransientError),
        (NoCredentialsError(), ConfigError),
        (PartialCredentialsError(provider="env", cred_var="key"), ConfigError),
        (NoRegionError(), ConfigError),
        (ProfileNotFound(profile="eu"), ConfigError),
        (InvalidRetryModeError(provided_retry_mode="x", valid_modes=["standard"]), ConfigError),
        (ConfigParseError(path="/config"), ConfigError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_unreachable_server_is_retried_and_missing_credentials_are_permanent(
    served: Callable[..., tuple[S3Objects, Server]], error: Exception, kind: type[AstraFlowError]
) -> None:
    objects, _ = served(error)
    with pytest.raises(kind, match="s3://bucket/root/a at http://host:9000"):
        objects.read("a")


def test_errors_name_the_object_and_the_remedy(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    def error_message(status: int, code: str) -> str:
        objects, _ = served(answer(status, code))
        with pytest.raises(AstraFlowError) as raised:
            objects.delete("k")
        return str(raised.value)

    name = "s3://bucket/root/k at http://host:9000"
    denied = f"access to {name} is denied (AccessDenied); check the profile eu in ~/.aws and the bucket's policy"
    assert error_message(403, "AccessDenied") == denied
    assert error_message(401, "Unauthorized") == denied.replace("AccessDenied", "Unauthorized")
    assert error_message(404, "NoSuchBucket").startswith(
        "the bucket bucket at http://host:9000 does not exist; create it"
    )
    assert error_message(400, "InvalidArgument").startswith(
        f"the store rejected {name} with status 400 (InvalidArgument): "
    )
    assert error_message(503, "SlowDown").startswith(f"a request for {name} failed: ")


def test_a_commit_is_one_conditional_put_and_a_failed_condition_is_a_conflict(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    objects, server = served(
        {}, answer(412, "PreconditionFailed"), answer(409, "ConditionalRequestConflict")
    )
    assert objects.create("a/b", b"x") is True
    assert objects.create("a/b", b"y") is False
    with pytest.raises(TransientError):  # two concurrent puts: the next try finds which was first
        objects.create("a/b", b"z")
    put = {"Bucket": "bucket", "Key": "root/a/b", "IfNoneMatch": "*"}
    assert server.asked == [("put_object", {**put, "Body": body}) for body in (b"x", b"y", b"z")]


def test_a_commit_of_5_gib_is_refused_before_it_is_sent(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3.CREATE_BYTES_MAX == 5 * 2**30
    monkeypatch.setattr(s3, "CREATE_BYTES_MAX", 4)
    objects, server = served()
    with pytest.raises(
        ConfigError,
        match=r"s3://bucket/root/a at http://host:9000 has 4 bytes; a commit to S3 is one PUT",
    ):
        objects.create("a", b"four")
    assert server.asked == []
    assert objects.create("a", b"fou")


def test_a_part_after_the_end_of_an_object_is_empty_and_other_errors_are_raised(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    objects, server = served(b"bc", answer(416, "InvalidRange"), answer(403, "AccessDenied"))
    assert objects.read_part("a", 1, 3) == b"bc"
    assert objects.read_part("a", 9, 12) == b""
    with pytest.raises(ConfigError):
        objects.read_part("a", 0, 1)
    path = "bucket/root/a"
    assert [arguments for _, arguments in server.asked[:2]] == [
        {"path": path, "start": 1, "end": 3},
        {"path": path, "start": 9, "end": 12},
    ]


def test_a_listing_is_followed_to_its_last_page_and_its_keys_are_relative(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    first = {
        "Contents": [{"Key": "root/w/1"}],
        "IsTruncated": True,
        "NextContinuationToken": "more",
    }
    last = {"Contents": [{"Key": "root/w/2"}], "IsTruncated": False}
    objects, server = served(first, last, {})
    assert objects.list("w/", "w/0") == ["w/1", "w/2"]
    assert objects.list("w/", "") == []
    page = {"Bucket": "bucket", "Prefix": "root/w/", "MaxKeys": 1000}
    assert server.asked == [
        ("list_objects_v2", {**page, "StartAfter": "root/w/0"}),
        ("list_objects_v2", {**page, "StartAfter": "root/w/0", "ContinuationToken": "more"}),
        ("list_objects_v2", page),
    ]


def page(number: int, token: str, entries: str = "Contents", name: str = "Key") -> dict[str, Any]:
    return {
        entries: [{name: f"root/w/{number}"}],
        "IsTruncated": True,
        "NextContinuationToken": token,
    }


@pytest.mark.parametrize("tokens", [["one", "one"], [""], ["one", "two", "two"]])
def test_a_server_whose_pages_do_not_go_on_is_refused(
    tokens: list[str], served: Callable[..., tuple[S3Objects, Server]]
) -> None:
    objects, server = served(*(page(number, token) for number, token in enumerate(tokens)))
    with pytest.raises(ConfigError, match=r"s3://bucket/root/w/ at .* its pages repeat or have no"):
        objects.list("w/", "")
    assert len(server.asked) == len(tokens)
    folders = (page(number, each, "CommonPrefixes", "Prefix") for number, each in enumerate(tokens))
    objects, _ = served(*folders)
    with pytest.raises(ConfigError, match="its pages repeat or have no end"):
        objects.folders("w/")


def test_a_listing_without_end_is_refused(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PAGE_CHARACTERS", 1)
    monkeypatch.setattr(s3, "LISTED_CHARACTERS_MAX", 3 * (len("root/w/0") + s3.KEY_CHARACTERS))
    pages = [page(number, f"token {number}") for number in range(9)]
    objects, server = served(*pages)
    with pytest.raises(ConfigError, match="its pages repeat or have no end"):
        objects.list("w/", "")
    assert len(server.asked) == 4
    objects, _ = served(*pages[:2], {"Contents": [{"Key": "root/w/2"}]})
    assert objects.list("w/", "") == ["w/0", "w/1", "w/2"]


def test_pages_without_keys_have_an_end(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "LISTED_CHARACTERS_MAX", 3 * s3.PAGE_CHARACTERS)
    empty = [{"IsTruncated": True, "NextContinuationToken": f"{number}"} for number in range(9)]
    objects, server = served(*empty)
    with pytest.raises(ConfigError, match="its pages repeat or have no end"):
        objects.list("w/", "")
    assert len(server.asked) == 4
    objects, _ = served(*empty[:2], {"Contents": [{"Key": "root/w/2"}]})
    assert objects.list("w/", "") == ["w/2"]


def test_an_answer_without_end_is_a_failed_request_and_an_upload_has_more_time(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(s3, "SLOWEST_BYTES_S", 2)

    def limited(loop: object, call: object, *args: object, timeout: float, **other: object):
        given.append(timeout)
        short = timeout == s3.ANSWER_TIMEOUT_S  # so that the test need not wait for it
        return sync(loop, call, *args, timeout=0.01 if short else timeout, **other)

    monkeypatch.setattr("fsspec.asyn.sync", limited)
    objects, _ = served(ENDLESS, ENDLESS, ENDLESS, {})
    for ask in (objects.exists, objects.delete, objects.folders):
        with pytest.raises(TransientError, match=r"a request for .* failed"):
            ask("a")
    assert objects.create("a", b"four")
    assert given == [s3.ANSWER_TIMEOUT_S] * 3 + [s3.ANSWER_TIMEOUT_S + 2]


def test_an_object_that_is_sent_without_end_is_a_failed_request(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(self: Body) -> bytes:
        await asyncio.Event().wait()
        return b""

    objects, server = served(b"body", b"body")
    assert objects.read("a") == b"body"
    monkeypatch.setattr(s3, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Body, "read", read)
    with pytest.raises(TransientError, match=r"a request for .* failed"):
        objects.read("a")
    assert server.bodies[1].was_closed


def test_folders_are_the_names_directly_below_a_prefix(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    objects, server = served(
        {"CommonPrefixes": [{"Prefix": "root/runs/a/"}, {"Prefix": "root/runs/b/"}]}
    )
    assert objects.folders("runs/") == ["a", "b"]
    assert server.asked[0][1]["Delimiter"] == "/"


def test_existence_is_checked_by_a_head_request(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    objects, server = served({}, answer(404, "404"), answer(503, "SlowDown"))
    assert objects.exists("a") is True
    assert objects.exists("b") is False
    with pytest.raises(TransientError):
        objects.exists("c")
    assert server.asked == [
        ("head_object", {"Bucket": "bucket", "Key": f"root/{key}"}) for key in "abc"
    ]


def test_reads_writes_and_deletes_use_keys_below_the_root(
    served: Callable[..., tuple[S3Objects, Server]],
) -> None:
    objects, server = served(b"x")
    assert objects.read("a") == b"x"
    objects.write("a", bytearray(b"y"))
    objects.delete("a")
    assert server.asked == [
        ("get_object", {"Bucket": "bucket", "Key": "root/a"}),
        ("pipe_file", {"path": "bucket/root/a", "body": b"y"}),
        ("delete_object", {"Bucket": "bucket", "Key": "root/a"}),
    ]


def test_the_body_of_an_object_above_its_size_limit_is_not_read(
    served: Callable[..., tuple[S3Objects, Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "BYTES_MAX", 3)
    monkeypatch.setattr(backend, "ARROW_BYTES_MAX", 4)
    objects, server = served(b"{ }", b"{  }", b"1234", b"12345")
    assert objects.read("stop.json") == b"{ }"
    with pytest.raises(
        CorruptError,
        match=r"^s3://bucket/root/stop\.json at .* has 4 bytes; an object of its kind has at most 3$",
    ):
        objects.read("stop.json")
    assert objects.read("0.arrow") == b"1234"
    with pytest.raises(
        CorruptError, match=r"0\.arrow at .* has 5 bytes; an object of its kind has at most 4$"
    ):
        objects.read("0.arrow")
    assert [(body.was_read, body.was_closed) for body in server.bodies] == [
        (True, True),
        (False, True),
    ] * 2


def test_a_process_has_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[S3Location] = []

    def open_one(place: S3Location) -> Server:
        opened.append(place)
        return Server()

    monkeypatch.setattr(s3, "_open", open_one)
    objects = S3Objects(PLACE)
    objects.exists("a")
    objects.exists("b")
    assert opened == [PLACE]
    monkeypatch.setattr(
        s3.os, "getpid", lambda: -1
    )  # a fork: the parent's event loop does not run in it
    objects.exists("c")
    assert opened == [PLACE, PLACE]


def test_the_connection_has_short_timeouts_and_no_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    created: list[dict[str, Any]] = []

    class Filesystem:
        retries = 5

        def __init__(self, **arguments: Any) -> None:
            created.append(arguments)

    monkeypatch.setattr(s3fs, "S3FileSystem", Filesystem)
    monkeypatch.setattr(
        s3,
        "_profile_settings",
        lambda profile: {"endpoint_url": "http://own", "region": "eu-west-1"},
    )
    assert s3._open(S3Location("bucket", profile="eu")).retries == 1
    s3._open(PLACE)
    config = {
        "connect_timeout": 5.0,
        "read_timeout": 30.0,
        "max_pool_connections": 64,
        "retries": {"total_max_attempts": 1},
    }
    expected = {
        **{
            "skip_instance_cache": True,
            "use_listings_cache": False,
            "default_fill_cache": False,
            "profile": "eu",
        },
        **{
            "endpoint_url": "http://own",
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": config,
        },
    }
    assert created == [expected, {**expected, "endpoint_url": "http://host:9000"}]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3Objects:
    """A store by the variables of the environment, at a port that refuses connections."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    return S3Objects(S3Location("bucket", "x"))


EVERY_REQUEST: list[Callable[[S3Objects], object]] = [
    lambda objects: objects.exists("frozen.json"),
    lambda objects: objects.read("a"),
    lambda objects: objects.read_part("a", 0, 1),
    lambda objects: objects.create("a", b""),
    lambda objects: objects.write("a", b""),
    lambda objects: objects.delete("a"),
    lambda objects: objects.list("", ""),
]


def test_a_missing_file_of_credentials_is_named_and_no_object_is_called_absent(
    nowhere: S3Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    for request in EVERY_REQUEST:
        with pytest.raises(ConfigError, match=f"there is no file {token}; correct the AWS_"):
            request(nowhere)


def test_a_missing_file_of_certificates_is_named(
    nowhere: S3Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"none\.pem"):
        nowhere.exists("a")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("address", ["nonsense", "http://", "http://me:s3cr3t@host", "ftp://host"])
def test_an_endpoint_of_the_environment_that_is_no_address_is_refused(
    nowhere: S3Objects, monkeypatch: pytest.MonkeyPatch, variable: str, address: str
) -> None:
    monkeypatch.setenv(variable, address)
    with pytest.raises(
        ConfigError, match=f"{variable} must look like https://host or http://host:9000"
    ) as raised:
        nowhere.exists("a")
    assert "s3cr3t" not in str(raised.value)


def test_an_endpoint_of_a_profile_that_is_no_address_is_refused(
    nowhere: S3Objects, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[profile eu]\nendpoint_url = nonsense\n")
    with pytest.raises(ConfigError, match="endpoint_url of the profile eu must look like"):
        S3Objects(S3Location("bucket", profile="eu")).exists("a")
