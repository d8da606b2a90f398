from dataclasses import replace
from pathlib import Path

import pytest

from deployments import environment
from deployments.home import PROJECT, Home
from deployments.processes import MARK
from deployments.record import Stack
from storage.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def _stack(own_server: bool = True) -> Stack:
    return Stack("http://127.0.0.1:4200/api", "http://127.0.0.1:5000", "file:///store", own_server=own_server)


def test_processes_of_the_stack_know_its_addresses_and_carry_its_mark(home: Home) -> None:
    made = environment.of_stack(home, _stack(), {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert made["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert made["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert made["ASTRAFLOW_STORE"] == "file:///store"
    assert made["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert made[MARK] == str(home.root)


def test_a_profile_of_the_person_is_hidden_from_our_server_only(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    assert environment.of_stack(home, _stack(), {})["PREFECT_HOME"] == str(home.prefect)
    assert "PREFECT_HOME" not in environment.of_stack(home, _stack(own_server=False), {})


def test_a_thread_count_that_the_person_chose_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment.of_stack(home, _stack(), {})["OMP_NUM_THREADS"] == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment.of_stack(home, _stack(), {})["OMP_NUM_THREADS"] == "1"


def test_no_secret_reaches_a_work_pool(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("PREFECT_API_KEY", "hidden")
    complete = environment.of_stack(home, _stack(), {})
    assert complete["AWS_SECRET_ACCESS_KEY"] == "hidden"
    shared = environment.of_pool(complete)
    assert "hidden" not in shared.values()
    assert shared["ASTRAFLOW_STORE"] == "file:///store"


def test_a_store_url_with_credentials_is_kept_from_a_work_pool() -> None:
    with pytest.raises(ConfigError, match=r"the store URL s3://…@bucket"):
        environment.of_pool({"ASTRAFLOW_STORE": "s3://key:hidden@bucket"})


def test_the_name_of_the_stores_secret_reaches_workers_everywhere(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_STORE_SECRET", raising=False)
    named = replace(_stack(), store_secret="store-keys")
    assert environment.secret_name(named) == "store-keys"
    assert environment.of_pool(environment.of_stack(home, named, {}))["ASTRAFLOW_STORE_SECRET"] == "store-keys"
    assert "ASTRAFLOW_STORE_SECRET" not in environment.of_pool(environment.of_stack(home, _stack(), {}))
    monkeypatch.setenv("ASTRAFLOW_STORE_SECRET", "others")
    assert environment.secret_name(named) == "others"


def test_a_stores_url_keeps_its_parameters_on_the_way_to_the_workers(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "s3://bucket/x/?endpoint=http://127.0.0.1:9000")
    assert environment.store_url(home) == "s3://bucket/x?endpoint=http://127.0.0.1:9000"


def test_a_proxy_is_never_asked_for_the_stack_itself(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "internal.example,localhost")
    assert environment.of_stack(home, _stack(), {})["no_proxy"] == "internal.example,localhost,127.0.0.1"


def test_only_the_clones_own_stack_is_announced_in_the_clone(home: Home) -> None:
    assert Home(PROJECT / ".astraflow").prefect_toml == PROJECT / "prefect.toml"
    assert home.prefect_toml == home.root / "prefect.toml"
