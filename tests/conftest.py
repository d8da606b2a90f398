"""Fixtures of empty stores: in memory, in a folder, and on a local S3 server on a free port."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from storage.store.object_store import ObjectStore, open_store

os.environ["PREFECT_API_URL"] = (
    ""  # no server, even if a `prefect.toml` or a profile of the developer names one
)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# before torch is imported: some virtual CPUs end a process at its first bf16 matrix product
os.environ.setdefault("OMP_NUM_THREADS", "1")
# as on the local stack: the processes of the tests and of ranks share the cores, and threads of
# tiny models would only wait for each other
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
# a fork of a process with threads may wait for ever for a lock that one of them held
BUCKET = "astraflow-tests"
LAPTOP = "tests/e2e/laptop/"

settings.register_profile(
    "astraflow", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # hypothesis: no deadlines that depend on the speed of the machine
settings.load_profile("astraflow")


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """Keep the tests of a file in one process, and all of tests/e2e/laptop, which share a stack."""

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # the package has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return LAPTOP if file.startswith(LAPTOP) else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Give torch its `linear` back, which DeepSpeed's ZeRO 3 replaces for the whole process, and
    which torch cannot compile then.
    """
    yield
    if torch := sys.modules.get("torch"):
        torch.nn.functional.linear = torch._C._nn.linear


@pytest.fixture(scope="session")
def _shared_chats() -> Iterator[object]:
    from tests.support.runs.shared_chats import SharedChats

    with closing(SharedChats()) as chats:
        yield chats


@pytest.fixture
def shared_chats(_shared_chats: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of agents share the child processes of their tokenizers, which stay until the end."""
    monkeypatch.setattr("rollout.service.agent_pool.ChatProcess", _shared_chats)


@pytest.fixture
def memory_store() -> ObjectStore:
    return open_store(f"memory://{uuid4().hex}")


@pytest.fixture
def local_store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server in its own process; the environment is set for it, with one empty
    bucket.
    """
    import boto3  # type: ignore[import-untyped]  # the package has no types
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", address)
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with closing(boto3.client("s3")) as client:
            client.create_bucket(Bucket=BUCKET)
        yield address
    server.stop()


@pytest.fixture
def s3_store(s3_server: str) -> ObjectStore:
    return open_store(f"s3://{BUCKET}/{uuid4().hex}")


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """Each kind of store in turn: a test that uses this fixture checks all of them."""
    result: ObjectStore = request.getfixturevalue(f"{request.param}_store")
    return result
