"""A run with its store and two regional mirrors on S3, set up by configuration only: the mirrors on
another server than the home store, every credential in a Prefect block.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prefect.blocks.system import Secret
from prefect.settings import temporary_settings

from deployments.paths import Home
from deployments.registration.client import connected
from storage import layout
from storage.coordination import heartbeats
from storage.formats.safetensors import weights_digest
from storage.machine.ports import HOST
from storage.records.progress import MirrorProgress, RolloutProgress
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, reader
from tasks.services.prefect_settings import settings_for
from tests.e2e.conftest import E2E_TIMEOUT_S, RECIPE, LocalStack, stack_in
from tests.support.stores.s3_process import s3_process

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(E2E_TIMEOUT_S)]

STEPS = 4
POLICIES = ["solver", "verifier"]
HOME = "s3://home/astraflow"
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIANOBODYMAYSEETHIS",
    "AWS_SECRET_ACCESS_KEY": "nobody/may+see/this/either",
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    """Addresses of the home store's server and of the mirrors' server, with their buckets. This
    process uses the first by its environment; the stack's processes do not have these variables.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**KEYS, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            environment.setenv(name, value)
        with s3_process(["home"]) as near, s3_process(["mirror-us", "mirror-eu"]) as far:
            environment.setenv("AWS_ENDPOINT_URL", near)
            yield near, far


@pytest.fixture(scope="module")
def cloud(
    servers: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    named = {
        "ASTRAFLOW_STORE": HOME,
        "ASTRAFLOW_STORE_SECRET": "store",
        "MLFLOW_TRACKING_URI": f"http://{HOST}:9",
    }
    with stack_in(Home(tmp_path_factory.mktemp("cloud") / "home"), named) as cloud:
        with temporary_settings(settings_for(cloud.stack.prefect_url)):
            block = {**KEYS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": servers[0]}
            Secret(value=json.dumps(block)).save("store")
        yield cloud


@pytest.fixture(scope="module")
def mirrors(servers: tuple[str, str]) -> dict[str, str]:
    """Region → URL."""
    return {
        "us-east": f"s3://mirror-us/weights?endpoint={servers[1]}",
        "eu-west": f"s3://mirror-eu?endpoint={servers[1]}",
    }


@pytest.fixture(scope="module")
def run_output(cloud: LocalStack, mirrors: dict[str, str]) -> str:
    """The output of `astraflow run`; the run is named `far` and is complete when its report exists.
    The weight decay is high, so that every step changes the weights. Polls are rare because each
    costs the test's servers some milliseconds of CPU.
    """
    settings = [
        f"steps={STEPS}",
        "policies.*.train.weight_decay=100",
        "evaluation=null",
        "tracking.enabled=false",
    ]
    settings += [
        "supervise.poll_interval_s=2",
        "supervise.heartbeat_interval_s=2",
        "rollout.refresh_interval_s=0.5",
    ]
    settings += [f"rollout.regions.{region}.mirror={url}" for region, url in mirrors.items()]
    assigned = [part for setting in settings for part in ("--set", setting)]
    result = cloud.astraflow(
        "run", "--recipe", str(RECIPE), "--run-id", "far", *assigned, "--detach"
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    cloud.wait_until(lambda: cloud.run_folder("far").exists(layout.REPORT), look_s=1.0)
    return result.stdout


@pytest.fixture
def run(cloud: LocalStack, run_output: str) -> ObjectStore:
    return cloud.run("far")


def test_the_run_completes_and_its_ledger_balances(cloud: LocalStack, run_output: str) -> None:
    assert "far is started" in run_output
    status = _json(cloud, "status", "far", "--json")
    assert (status["state"], status["reason"]) == (
        "completed",
        f"all policies reached version {STEPS}",
    )
    verdict = _json(cloud, "verify", "far", "--json")
    assert (verdict["ok"], verdict["violations"]) == (True, [])


@pytest.mark.parametrize("region", ["us-east", "eu-west"])
def test_every_version_is_in_both_mirrors_bit_for_bit(
    run: ObjectStore, mirrors: dict[str, str], region: str
) -> None:
    mirror = open_store(mirrors[region]).sub(layout.run_prefix("far"))
    for policy in POLICIES:
        assert manifests.latest(run, policy) == STEPS
        chain = [manifests.read_manifest(run, policy, version) for version in range(STEPS + 1)]
        for manifest in chain:
            folder = layout.weights(policy, manifest.version)
            for name in ("manifest.json", *(file.name for file in manifest.files)):
                assert mirror.get(f"{folder}/{name}") == run.get(f"{folder}/{name}")
        assert [manifest.kind for manifest in chain] == ["anchor", *["delta"] * STEPS]
        assert sum(file.num_bytes for manifest in chain[1:] for file in manifest.files) > 0
        assert weights_digest(reader.fetch(mirror, policy, STEPS)) == chain[-1].digest


def test_weights_cross_once_and_are_read_in_the_region(run: ObjectStore) -> None:
    beats = {beat.id: beat for beat in heartbeats.readable(run)}
    for region in ("us-east", "eu-west"):
        mirror, worker = beats[f"mirror-{region}"], beats[f"rollout-{region}-0"]
        assert (mirror.state, mirror.versions) == ("done", dict.fromkeys(POLICIES, STEPS))
        for policy in POLICIES:
            chain = [manifests.read_manifest(run, policy, version) for version in range(STEPS + 1)]
            whole = sum(file.num_bytes for manifest in chain for file in manifest.files)
            assert isinstance(mirror.progress, MirrorProgress)
            assert isinstance(worker.progress, RolloutProgress)
            assert mirror.progress.mirrored_bytes[policy] >= whole
            assert worker.progress.weights_bytes_mirror[policy] > 0


def test_commands_use_the_store_of_the_stack(cloud: LocalStack, run_output: str) -> None:
    assert [row["version"] for row in _json(cloud, "weights", "far", "solver", "--json")] == list(
        range(STEPS + 1)
    )
    assert cloud.astraflow("report", "far").stdout == f"{HOME}/runs/far/report.html\n"


def test_no_object_log_or_stack_record_contains_the_credentials(
    cloud: LocalStack, run: ObjectStore, mirrors: dict[str, str], run_output: str
) -> None:
    """The folder of the stack has its logs, its record, and Prefect's database: parameters, work
    pools and the encrypted block.
    """
    places = [cloud.store, *map(open_store, mirrors.values())]
    bodies = {f"{store.url}/{key}": store.get(key) for store in places for key in store.list()}
    bodies |= {
        str(path): path.read_bytes() for path in cloud.home.root.rglob("*") if path.is_file()
    }
    assert {f"{run.url}/{layout.RUN}", str(cloud.home.record)} <= bodies.keys()
    assert any(name.startswith(str(cloud.home.flow_logs)) for name in bodies)
    with connected(cloud.stack.prefect_url) as prefect:
        bodies["the block, as Prefect shows it"] = prefect.request(
            "GET", "/block_types/slug/secret/block_documents"
        ).content
    for text in KEYS.values():
        assert text not in run_output
        assert [name for name, body in bodies.items() if text.encode() in body] == []


def _json(cloud: LocalStack, *arguments: str) -> Any:
    done = cloud.astraflow(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
