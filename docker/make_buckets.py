"""Create buckets that are missing: `python docker/make_buckets.py NAME …`.

Address and keys are those of every AWS client: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ….
"""

import sys
from collections.abc import Sequence
from contextlib import closing

from botocore.exceptions import ClientError
from botocore.session import get_session

OWN = "BucketAlreadyOwnedByYou"


def make(names: Sequence[str]) -> None:
    """Create them; one that exists is left as it is."""
    client = get_session().create_client("s3")
    with closing(client):
        for name in names:
            try:
                client.create_bucket(Bucket=name)
            except ClientError as error:
                if error.response["Error"]["Code"] != OWN:
                    raise
            print(f"bucket {name}")


if __name__ == "__main__":
    make(sys.argv[1:])
