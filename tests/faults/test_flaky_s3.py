"""A store with broken connections: responses are correct and commits happen once."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest

from storage.errors import ConfigError, ConflictError, TransientError
from storage.store.object_store import ObjectStore, check_store, open_store
from tests.conftest import BUCKET
from tests.faults.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyProxy]:
    with FlakyProxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


@pytest.fixture
def flaky_store(proxy: FlakyProxy) -> ObjectStore:
    return open_store(f"s3://{BUCKET}/{uuid4().hex}")


@pytest.mark.parametrize("fault", ["drop", "refuse", "lose", "truncate"])
def test_each_kind_of_transient_failure_is_retried_with_success(
    flaky_store: ObjectStore, proxy: FlakyProxy, fault: str
) -> None:
    flaky_store.create("warm", b"up")
    for call in (
        lambda: flaky_store.create("run.json", b"body" * 1000),
        lambda: flaky_store.get("run.json"),
        lambda: flaky_store.exists("run.json"),
        lambda: flaky_store.put("hint", b"h"),
        lambda: flaky_store.list(),
        lambda: flaky_store.delete("hint"),
    ):
        proxy.fail([fault])
        call()
        assert proxy.requests >= 1
    assert flaky_store.get("run.json") == b"body" * 1000
    assert flaky_store.list() == ["run.json", "warm"]


def test_a_create_with_a_lost_response_succeeds(
    flaky_store: ObjectStore, proxy: FlakyProxy
) -> None:
    proxy.fail(["lose", "lose"])
    flaky_store.create("run.json", b"mine")
    assert flaky_store.get("run.json") == b"mine"


def test_a_lost_response_does_not_hide_a_concurrent_writers_success(
    flaky_store: ObjectStore, proxy: FlakyProxy, s3_server: str
) -> None:
    flaky_store.create("run.json", b"rival")
    proxy.fail(["lose", "drop"])
    with pytest.raises(ConflictError):
        flaky_store.create("run.json", b"mine")
    assert flaky_store.get("run.json") == b"rival"


def test_a_concurrent_write_in_progress_is_waited_for(
    flaky_store: ObjectStore, proxy: FlakyProxy
) -> None:
    proxy.fail(["compete", "compete"])
    flaky_store.create("run.json", b"mine")
    assert flaky_store.get("run.json") == b"mine"


def test_a_412_without_a_named_condition_is_a_conflict(
    flaky_store: ObjectStore, proxy: FlakyProxy
) -> None:
    flaky_store.create("run.json", b"first")
    proxy.fail(["deny"])
    with pytest.raises(ConflictError):
        flaky_store.create("run.json", b"second")
    proxy.fail(["deny"])
    flaky_store.create("run.json", b"first")


def test_retries_of_a_dead_server_end(flaky_store: ObjectStore, proxy: FlakyProxy) -> None:
    flaky_store.create("warm", b"up")
    proxy.fail(["refuse"] * 100)
    with pytest.raises(TransientError, match=r"^a request for s3://.* failed: "):
        replace(flaky_store, patience_s=1.0).get("warm")


def test_check_of_an_unreachable_server_names_it(
    s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("storage.store.object_store.CHECK_PATIENCE_S", 0.5)
    with pytest.raises(
        ConfigError, match=r"s3://bucket/x cannot be used: .*start the server it names"
    ):
        check_store(open_store("s3://bucket/x"))


def test_a_missing_bucket_gives_an_error_of_one_sentence(s3_server: str) -> None:
    with pytest.raises(ConfigError, match="the bucket no-such-bucket does not exist; create it"):
        open_store("s3://no-such-bucket/x").create("a", b"x")


def test_missing_credentials_give_an_error_of_one_sentence(
    s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(
        ConfigError,
        match=r"cannot be reached: Unable to locate credentials; correct the AWS_… variables",
    ):
        open_store(f"s3://{BUCKET}/x").create("a", b"x")
