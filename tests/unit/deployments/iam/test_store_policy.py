"""The policy of a store is enforced by a local server: what the services need is allowed, and nothing
beside the store.
"""

import json
from collections.abc import Iterator
from contextlib import closing

import boto3  # type: ignore[import-untyped]  # the package has no types
import httpx
import pytest

from storage.errors import AstraFlowError, ConflictError, NotFoundError
from storage.store import object_store
from storage.store.object_store import open_store
from tests.support.checkout import ROOT
from tests.support.stores.s3_process import s3_process

pytestmark = pytest.mark.s3
POLICY = (ROOT / "deployments" / "iam" / "store.json").read_text()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server that enforces policies, with one user who has the policy; its keys are set."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "admin")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "admin")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with s3_process(["models", "others"]) as address:
            environment.setenv("AWS_ENDPOINT_URL", address)
            with closing(boto3.client("s3")) as s3:
                s3.put_object(Bucket="models", Key="elsewhere/x", Body=b"1")
            granted = POLICY.replace("BUCKET", "models").replace("PREFIX", "astraflow")
            with closing(boto3.client("iam")) as iam:
                iam.create_user(UserName="astraflow")
                iam.put_user_policy(
                    UserName="astraflow",
                    PolicyName="store",
                    PolicyDocument=json.dumps(json.loads(granted)),
                )
                key = iam.create_access_key(UserName="astraflow")["AccessKey"]
            environment.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
            environment.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
            httpx.post(f"{address}/moto-api/reset-auth", content=b"0").raise_for_status()
            yield address


def test_everything_that_a_store_does_is_allowed(address: str) -> None:
    store = open_store("s3://models/astraflow")
    object_store.check_store(store)
    store.create("runs/a/x.json", b"1")
    with pytest.raises(ConflictError):
        store.create("runs/a/x.json", b"2")
    store.put("runs/a/x.json", b"3")
    assert store.get("runs/a/x.json") == b"3"
    assert list(store.list("runs/")) == ["runs/a/x.json"]
    store.delete("runs/a/x.json")
    assert list(store.list()) == []
    with pytest.raises(NotFoundError):
        store.get("runs/a/x.json")


@pytest.mark.parametrize("place", ["s3://others/astraflow", "s3://models/elsewhere"])
def test_nothing_beside_the_store_is(address: str, place: str) -> None:
    """The names of other objects in the bucket can be listed, not those of another bucket."""
    store = open_store(place)
    uses = [lambda: store.get("x"), lambda: store.put("y", b"1"), lambda: store.delete("x")]
    if "others" in place:
        uses.append(lambda: list(store.list()))
    for use in uses:
        with pytest.raises(AstraFlowError, match=r"403|Forbidden|denied|not authorized"):
            use()
