import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.paths import PROJECT, Home
from deployments.registration.client import connected
from deployments.servers import auth
from deployments.stack import environment, state
from deployments.stack.processes import MARK
from deployments.stack.state import Stack
from storage.errors import ConfigError
from storage.machine.limited_process import child_environment
from tests.support.http_servers import one_answer, refusing_port
from trainer.engines.ranks.environment import rank_environment


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def _stack(own_server: bool = True) -> Stack:
    return Stack(
        prefect_url="http://127.0.0.1:4200/api",
        mlflow_url="http://127.0.0.1:5000",
        store_url="file:///store",
        own_server=own_server,
    )


def test_processes_of_the_stack_get_its_addresses_and_its_mark(home: Home) -> None:
    variables = environment.of_stack(home, _stack(), {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert variables["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert variables["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert variables["ASTRAFLOW_STORE"] == "file:///store"
    assert variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert variables[MARK] == str(home.root)


def test_a_prefect_profile_of_the_user_is_hidden_only_from_our_server(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    assert environment.of_stack(home, _stack(), {})["PREFECT_HOME"] == str(home.prefect)
    assert "PREFECT_HOME" not in environment.of_stack(home, _stack(own_server=False), {})


def test_a_thread_count_set_by_the_user_is_kept(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment.of_stack(home, _stack(), {})["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment.of_stack(home, _stack(), {})["OMP_NUM_THREADS"] == "1"


def test_no_secret_is_passed_to_a_work_pool(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("PREFECT_API_KEY", "hidden")
    complete = environment.of_stack(home, _stack(), {})
    assert complete["AWS_SECRET_ACCESS_KEY"] == "hidden"
    shared = environment.of_pool(complete)
    assert "hidden" not in shared.values()
    assert shared["ASTRAFLOW_STORE"] == "file:///store"


def test_a_store_url_with_credentials_is_not_passed_to_a_work_pool() -> None:
    with pytest.raises(
        ConfigError, match=r"ASTRAFLOW_STORE contains a credential beside the address s3://bucket"
    ):
        environment.of_pool({"ASTRAFLOW_STORE": "s3://key:hidden@bucket"})


def test_the_name_of_the_stores_secret_is_passed_to_all_workers(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASTRAFLOW_STORE_SECRET", raising=False)
    named = replace(_stack(), store_secret="store-keys")
    assert environment.secret_name(named) == "store-keys"
    assert (
        environment.of_pool(environment.of_stack(home, named, {}))["ASTRAFLOW_STORE_SECRET"]
        == "store-keys"
    )
    assert "ASTRAFLOW_STORE_SECRET" not in environment.of_pool(
        environment.of_stack(home, _stack(), {})
    )
    monkeypatch.setenv("ASTRAFLOW_STORE_SECRET", "others")
    assert environment.secret_name(named) == "others"


def test_a_store_url_keeps_its_parameters_for_the_workers(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "s3://bucket/x/?endpoint=http://127.0.0.1:9000")
    assert environment.store_url(home) == "s3://bucket/x?endpoint=http://127.0.0.1:9000"


@pytest.fixture(autouse=True)
def _environment_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that `prepare` sets."""
    for name in (*environment.UNTRACKED, "PREFECT_API_AUTH_STRING", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)


@pytest.fixture
def secret(home: Home) -> str:
    return auth.create(home)


def test_workers_and_commands_have_the_secret_and_work_pools_do_not(
    home: Home, secret: str
) -> None:
    variables = environment.of_stack(home, _stack(), {})
    assert variables["PREFECT_API_AUTH_STRING"] == secret
    assert (
        f"{variables['MLFLOW_TRACKING_USERNAME']}:{variables['MLFLOW_TRACKING_PASSWORD']}" == secret
    )
    password = secret.partition(":")[2]
    assert not [name for name, value in environment.of_pool(variables).items() if password in value]


def test_credentials_are_sent_only_to_the_servers_they_belong_to(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = (
        "PREFECT_API_KEY",
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
    )
    for name in theirs:
        monkeypatch.setenv(name, "theirs")
    assert "theirs" not in environment.of_stack(home, _stack(), {}).values()
    elsewhere = environment.of_stack(home, replace(_stack(own_server=False), own_mlflow=False), {})
    assert {elsewhere[name] for name in theirs} == {"theirs"}
    assert not [name for name, value in elsewhere.items() if secret.partition(":")[2] in value]
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    elsewhere = environment.of_stack(home, _stack(own_server=False), {})
    assert (
        elsewhere["PREFECT_API_AUTH_STRING"] == ""
    )  # not the address of a `prefect.toml` in the clone


KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "PREFECT_API_KEY",
    "HF_TOKEN",
    "ASTRAFLOW_STORE_SECRET",
)


def test_workers_inherit_credentials_and_servers_do_not(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, "hidden")
    prefect, mlflow = (
        environment.of_prefect_server(home, _stack()),
        environment.of_mlflow_server(home),
    )
    assert not {*KEYS} & {*prefect, *mlflow}
    assert environment.of_stack(home, _stack(), {})["AWS_SECRET_ACCESS_KEY"] == "hidden"
    assert prefect["PATH"] == mlflow["PATH"] == os.environ["PATH"]
    assert prefect[MARK] == mlflow[MARK] == mlflow["ASTRAFLOW_HOME"] == str(home.root)


def test_torch_makes_its_folder_in_the_home_and_not_in_tmp(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(environment.TORCH_CACHE, raising=False)
    environment.prepare(home)
    assert environment.TORCH_CACHE not in os.environ  # the home may not exist yet
    services, worker = environment.of_stack(home, _stack(), {}), environment.of_worker(home, (), {})
    state.save(home, _stack())
    environment.prepare(home)
    own = str(home.root / "torch")
    assert [each[environment.TORCH_CACHE] for each in (os.environ, services, worker)] == [own] * 3
    assert child_environment(services)[environment.TORCH_CACHE] == own
    assert rank_environment(services, "")[environment.TORCH_CACHE] == own


FOREIGN = ("PGP_PASSPHRASE", "PYTHON_KEYRING_PW", "LD_SDK_KEY", "LC_PASSWORD", "XDG_TOKEN")


def test_servers_inherit_no_variable_that_only_begins_like_theirs(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOREIGN:
        monkeypatch.setenv(name, "hidden")
    kept = {"PGPASSWORD": "p", "PYTHONPATH": "/x", "LC_ALL": "C", "PREFECT_SERVER_X": "1"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    prefect = environment.of_prefect_server(home, _stack())
    mlflow = environment.of_mlflow_server(home)
    assert "hidden" not in {*prefect.values(), *mlflow.values()}
    assert kept.items() <= prefect.items()
    assert {"PGPASSWORD", "PREFECT_SERVER_X"} & {*mlflow} == set()
    assert mlflow["PYTHONPATH"] == "/x"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_another_spelling_of_our_servers_address_is_ours(
    home: Home, secret: str, host: str, slash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save(home, _stack())
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}:4200/api{slash}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{host}:5000{slash}")
    environment.prepare(home)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert os.environ["PREFECT_API_AUTH_STRING"] == secret


@pytest.mark.parametrize("url", ["http://localhost:4201/api", "http://other:4200/api"])
def test_the_address_of_another_server_is_kept(
    home: Home, secret: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save(home, _stack())
    monkeypatch.setenv("PREFECT_API_URL", url)
    environment.prepare(home)
    assert (os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]) == (url, "")


def test_the_prefect_server_requires_the_secret_and_serves_only_its_own_pages(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "another")
    monkeypatch.setenv("PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS", "*")
    monkeypatch.setenv(
        "PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://host/prefect"
    )
    variables = environment.of_prefect_server(home, _stack())
    assert variables["PREFECT_SERVER_API_AUTH_STRING"] == secret
    assert (
        variables["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"]
        == "http://127.0.0.1:4200,http://localhost:4200"
    )
    assert (
        variables["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://host/prefect"
    )


def test_telemetry_is_off_for_local_and_remote_servers(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(_stack(own_server=False), own_mlflow=False)
    silent = {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for stack in (_stack(), elsewhere):
        worker = environment.of_stack(home, stack, {})
        for made in (
            worker,
            environment.of_pool(worker),
            environment.of_prefect_server(home, stack),
        ):
            assert silent.items() <= made.items()
    assert silent.items() <= environment.of_mlflow_server(home).items()
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    environment.prepare(home)
    assert {name: os.environ[name] for name in silent} == silent


def test_a_command_sends_the_secret_to_our_own_server_only(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save(home, _stack())
    for named, sent in (
        ("", secret),
        ("http://127.0.0.1:4200/api", secret),
        ("https://prefect.example/api", ""),
    ):
        monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
        monkeypatch.setenv("PREFECT_API_URL", named)
        environment.prepare(home)
        assert os.environ["PREFECT_API_AUTH_STRING"] == sent
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "theirs")
    environment.prepare(home)
    assert os.environ["PREFECT_API_AUTH_STRING"] == "theirs"


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_command_sends_the_secret_of_our_server_to_no_proxy(
    home: Home, secret: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_port() as port, one_answer(200, b"{}", "application/json") as proxy:
        url = f"http://127.0.0.1:{port}/api"
        state.save(home, replace(_stack(), prefect_url=url))
        monkeypatch.setenv("PREFECT_API_URL", "")
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        environment.prepare(home)
        with pytest.raises(ConfigError, match="does not respond"), connected(url) as client:
            client.read_work_pools()
    assert proxy.requests == []


def test_a_proxy_is_used_for_a_server_that_is_not_ours(
    home: Home, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save(home, _stack())
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    environment.prepare(home)
    assert not {"NO_PROXY", "no_proxy"} & {*os.environ}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("*", "*"), ("a.example,*", "*"), ("a.example", "a.example,127.0.0.1,localhost")],
)
def test_our_server_is_added_to_the_hosts_without_a_proxy_and_a_star_stays_alone(
    home: Home, given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.save(home, _stack())
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.setenv("no_proxy", given)
    environment.prepare(home)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == (expected, expected)


@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_an_address_with_credentials_is_passed_neither_to_a_work_pool_nor_to_commands(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=f"{variable} contains a credential beside the address https://host/api"
    ):
        environment.of_pool({variable: "https://me:hidden@host/api"})
    monkeypatch.setenv(variable, "https://me:hidden@host/api")
    with pytest.raises(
        ConfigError, match=f"{variable} contains a credential beside the address https://host/api"
    ):
        environment.given(variable)


def test_a_proxy_is_never_used_for_the_stack_itself(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "internal.example,localhost")
    assert (
        environment.of_stack(home, _stack(), {})["no_proxy"]
        == "internal.example,localhost,127.0.0.1"
    )


def test_only_the_stack_of_the_clone_is_written_to_its_prefect_toml(home: Home) -> None:
    assert Home(PROJECT / ".astraflow").prefect_toml == PROJECT / "prefect.toml"
    assert home.prefect_toml == home.root / "prefect.toml"


def test_a_secret_in_the_place_of_its_name_is_refused_before_it_is_stored(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE_SECRET", "wJalrXUtnFEMI/K7MDENG")
    for refuses in (environment.refuse_bad_addresses, environment.secret_name):
        with pytest.raises(ConfigError, match=r"^ASTRAFLOW_STORE_SECRET is not the name") as raised:
            refuses()
        assert "wJal" not in str(raised.value)


def test_events_of_our_prefect_server_have_the_present_tags_of_a_flow_run() -> None:
    """An automation selects a supervisor by a tag that it gets after its first event."""
    program = (
        "from prefect.server.models import events\n"
        "events._flow_run_resource_data_cache['id'] = {'flow-run': {'tags': []}}\n"
        "print(events._flow_run_resource_data_cache.get('id'))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment.PREFECT_SERVER,
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout == "None\n"


def test_a_webhook_in_the_place_of_its_block_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASTRAFLOW_NOTIFY", "slack-webhook/on-call")
    environment.refuse_bad_addresses()
    monkeypatch.setenv("ASTRAFLOW_NOTIFY", "https://hooks.slack.com/services/T0/B0/wJalrXUtnFEMI")
    with pytest.raises(ConfigError, match=r"^ASTRAFLOW_NOTIFY does not name") as raised:
        environment.refuse_bad_addresses()
    assert "wJal" not in str(raised.value)
