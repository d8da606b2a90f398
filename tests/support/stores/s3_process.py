"""An S3 server in its own process, on a free local port: moto's, empty, stopped at the end of the
block.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import httpx

from storage.machine.ports import unusual_port
from tests.support.patience import PATIENCE_S

HOST = "127.0.0.1"


@contextmanager
def s3_process(buckets: Sequence[str]) -> Iterator[str]:
    """The server's address. The caller's environment needs credentials of any value."""
    import boto3  # type: ignore[import-untyped]  # the package has no types

    port = unusual_port()
    address = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not _answers(address):
            assert process.poll() is None, (
                f"moto's server ended at its start with {process.returncode}"
            )
            assert time.monotonic() < deadline_s, (
                f"moto's server did not answer within {PATIENCE_S:.0f} s"
            )
            time.sleep(0.1)
        with closing(boto3.client("s3", endpoint_url=address)) as client:
            for bucket in buckets:
                client.create_bucket(Bucket=bucket)
        yield address
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/moto-api/", timeout=1.0).is_success
    except httpx.TransportError:
        return False
