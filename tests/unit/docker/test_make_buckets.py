import runpy
from uuid import uuid4

import boto3  # type: ignore[import-untyped]  # the package has no types
import pytest
from botocore.exceptions import ClientError

from tests.support.compose import FOLDER

pytestmark = pytest.mark.s3


def test_missing_buckets_are_created_and_others_keep_their_objects(s3_server: str) -> None:
    make = runpy.run_path(str(FOLDER / "make_buckets.py"))["make"]
    client, first, second = boto3.client("s3"), uuid4().hex, uuid4().hex
    make([first])
    client.put_object(Bucket=first, Key="kept", Body=b"1")
    make([first, second])
    names = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    assert {first, second} <= names
    assert client.get_object(Bucket=first, Key="kept")["Body"].read() == b"1"
    client.close()


def test_a_bucket_that_cannot_be_created_is_an_error(s3_server: str) -> None:
    make = runpy.run_path(str(FOLDER / "make_buckets.py"))["make"]
    with pytest.raises(ClientError, match="InvalidBucketName"):
        make(["ab"])
