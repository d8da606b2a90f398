import pytest

from storage.errors import ConfigError
from storage.store.object_store import open_store
from storage.store.s3_url import S3Location, parse

SECRET = "wJalrXUtnFEMI"


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as raised:
        open_store(url)
    return str(raised.value)


def test_a_url_gives_the_bucket_the_prefix_and_the_connection() -> None:
    assert parse("s3://bucket/some/prefix/") == S3Location("bucket", "some/prefix")
    assert parse("s3://bucket?profile=eu") == S3Location("bucket", profile="eu")
    both = S3Location("bucket", "x", "http://127.0.0.1:9000", "eu west")
    assert parse("s3://bucket/x?endpoint=http://127.0.0.1:9000/&profile=eu%20west") == both
    assert parse(f"{both.url}?{both.query}") == both


def test_the_query_of_a_url_is_not_part_of_keys_or_names() -> None:
    store = open_store("s3://bucket/x/?profile=eu&endpoint=https://host")
    assert store.url == "s3://bucket/x"
    assert store.address == "s3://bucket/x?endpoint=https://host&profile=eu"
    run = store.sub("runs/a")
    assert (run.url, run.prefix) == ("s3://bucket/x/runs/a", "runs/a/")
    assert run.address == "s3://bucket/x/runs/a?endpoint=https://host&profile=eu"
    assert open_store(run.address).address == run.address


def test_a_url_without_parameters_is_its_own_address() -> None:
    assert open_store("s3://bucket/x/").address == "s3://bucket/x"
    assert open_store("memory://a").sub("b").address == "memory://a/b"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"s3://AKIA:{SECRET}@bucket/x", "s3://…@bucket/x"),
        (f"s3://AKIA:{SECRET}/{SECRET}@bucket/x", "s3://…@bucket/x"),
        (f"s3://{SECRET}@bucket/x", "s3://…@bucket/x"),
        (
            f"s3://bucket/x?access_key=AKIA&secret_key={SECRET}",
            "s3://bucket/x has an unknown parameter access_key",
        ),
        (
            f"s3://bucket/x?X-Amz-Signature={SECRET}",
            "s3://bucket/x has an unknown parameter X-Amz-Signature",
        ),
        (f"s3://bucket/x?{SECRET}", "s3://bucket/x has an unknown parameter; "),
        (
            f"s3://bucket/x?endpoint=https://AKIA:{SECRET}@host",
            "the endpoint of the store URL s3://bucket/x must look like",
        ),
        (
            f"s3://bucket/x?endpoint=https://host?secret={SECRET}",
            "the endpoint of the store URL s3://bucket/x must look like",
        ),
        (f"https://AKIA:{SECRET}@host/bucket", "https://… has the unknown scheme"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str, shown: str) -> None:
    error = refusal(url)
    assert shown in error
    assert SECRET not in error
    assert "https://…" in error or "credentials belong in AWS_… variables or in a profile" in error


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///x", "has no bucket"),
        ("s3://?profile=eu", "has no bucket"),
        ("s3://bucket?regoin=eu", "unknown parameter regoin; it takes endpoint and profile"),
        ("s3://bucket?profile=", "needs one value for its parameter profile"),
        ("s3://bucket?profile=a&profile=b", "needs one value for its parameter profile"),
        ("s3://bucket?endpoint=host:9000", "must look like https://host or http://host:9000"),
        (
            "s3://bucket?endpoint=http://host:port",
            "must look like https://host or http://host:9000",
        ),
        ("s3://bucket?endpoint=http://", "must look like https://host or http://host:9000"),
        ("file:///x?endpoint=http://h", "takes no parameters"),
    ],
)
def test_an_unsupported_url_gives_an_error_of_one_sentence(url: str, message: str) -> None:
    assert message in refusal(url)
