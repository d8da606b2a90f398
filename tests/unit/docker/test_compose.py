"""`docker/compose.yaml` as data: no Docker is needed, and none of it is started here.

Commands are parsed by the programs themselves. Postgres' SQL and MLflow's command are run by
`tests/e2e/test_cluster.py`.
"""

import re
import warnings
from typing import Any

import pytest
import typer
from mlflow import environment_variables
from prefect.settings.legacy import _get_valid_setting_names
from prefect.settings.models.root import Settings

from deployments.cli.app import app
from deployments.registration import pools
from deployments.stack import environment
from storage.store import addresses
from tests.support.compose import FOLDER, VARIABLE, compose, new_env

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of modules that its command imports
    from mlflow.cli import cli as mlflow_cli

ENV = new_env()
COMPOSE = compose(ENV)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GPU: dict[str, dict[str, Any]] = compose(ENV, "compose.gpu.yaml")["services"]
OURS = {name: each for name, each in SERVICES.items() if "build" in each}
COMMANDS = [
    *((name, each["command"]) for name, each in OURS.items()),
    *((f"{name} on GPUs", each["command"]) for name, each in GPU.items()),
]
READ_BY_IMAGES = {
    "postgres": {"POSTGRES_USER", "POSTGRES_PASSWORD"},
    "s3": {"MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"},
    "proxy": {"PREFECT_HOST", "MLFLOW_HOST", "S3_HOST"},
}
READ_BY_BOTO = {
    *("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"),
}


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_each_command_exists_and_accepts_its_options(name: str, command: list[str]) -> None:
    program, *arguments = command
    if program == "astraflow":
        _parse(typer.main.get_command(app), arguments)
    elif program == "mlflow":
        _parse(mlflow_cli, arguments)
    elif program == "python":
        assert (FOLDER.parent / arguments[0]).is_file()
    else:
        assert command[:3] == ["prefect", "server", "start"]
        options = {"--host", "--port"}
        assert {argument for argument in arguments if argument.startswith("--")} == options


def test_a_command_with_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match=r"No such option.*--pools"):
        _parse(typer.main.get_command(app), ["worker", "--pools", "rollout"])


def _parse(group: Any, arguments: list[str]) -> None:
    name, *rest = arguments
    group.commands[name].make_context(name, rest)


def test_each_pool_has_a_worker_and_each_region_of_the_recipes_one() -> None:
    commands = [each["command"] for each in OURS.values() if "worker" in each["command"]]
    assert {command[command.index("--pool") + 1] for command in commands} == set(pools.NAMES)
    regions = [command[-1] for command in commands if "--region" in command]
    assert sorted(regions) == ["eu-west", "us-east"]
    assert set(GPU) < set(SERVICES)


def test_each_variable_is_one_that_its_program_reads() -> None:
    ours = {*addresses.VARIABLES, *environment.POOL, environment.PREFECT_AUTH}
    mlflow = {each.name for each in vars(environment_variables).values() if hasattr(each, "name")}
    server = mlflow_cli.commands["server"]
    mlflow |= {each.envvar for each in server.params if isinstance(each.envvar, str)}
    known = {*ours, *mlflow, *_get_valid_setting_names(Settings), *READ_BY_BOTO}
    assert {"ASTRAFLOW_STORE", "MLFLOW_BACKEND_STORE_URI", "PREFECT_API_URL"} <= known
    for name, each in SERVICES.items():
        read = READ_BY_IMAGES.get(name, known)
        assert set(each.get("environment", {})) <= read, name


def test_prefects_server_has_the_settings_of_the_local_stack() -> None:
    expected = {**environment.PREFECT_SERVER, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    assert expected.items() <= SERVICES["prefect"]["environment"].items()


def test_servers_and_their_clients_have_the_same_secrets() -> None:
    prefect, mlflow = SERVICES["prefect"]["environment"], SERVICES["mlflow"]["environment"]
    client, store = SERVICES["control"]["environment"], SERVICES["s3"]["environment"]
    assert prefect["PREFECT_SERVER_API_AUTH_STRING"] == client["PREFECT_API_AUTH_STRING"]
    assert mlflow["MLFLOW_AUTH_ADMIN_USERNAME"] == client["MLFLOW_TRACKING_USERNAME"]
    assert mlflow["MLFLOW_AUTH_ADMIN_PASSWORD"] == client["MLFLOW_TRACKING_PASSWORD"]
    for user in (client, mlflow):
        assert user["AWS_ACCESS_KEY_ID"] == store["MINIO_ROOT_USER"]
        assert user["AWS_SECRET_ACCESS_KEY"] == store["MINIO_ROOT_PASSWORD"]
    password = SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"]
    database = f"astraflow:{password}@postgres:5432"
    assert prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"].endswith(f"{database}/prefect")
    assert mlflow["MLFLOW_BACKEND_STORE_URI"].endswith(f"{database}/mlflow")
    assert "--app-name=basic-auth" in SERVICES["mlflow"]["command"]


def test_addresses_name_services_and_their_ports() -> None:
    listens = {"prefect": "4200", "mlflow": "5000", "s3": "9000", "postgres": "5432"}
    text = (FOLDER / "compose.yaml").read_text() + (FOLDER / "Caddyfile").read_text()
    for name, port in listens.items():
        named = set(re.findall(rf"(?:@|//|proxy ){name}:(\d+)", text))
        assert named == {port}, name
    assert "4200" in SERVICES["prefect"]["command"]
    assert "--port=5000" in SERVICES["mlflow"]["command"]


def test_only_the_proxy_can_be_reached_from_other_machines() -> None:
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert SERVICES["proxy"]["profiles"] == ["tls"]
    del published["proxy"]
    assert sorted(published) == ["mlflow", "prefect", "s3"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_a_service_that_others_wait_for_can_become_ready() -> None:
    for name, each in SERVICES.items():
        for other, wait in each.get("depends_on", {}).items():
            waited = SERVICES[other]
            if wait["condition"] == "service_healthy":
                assert waited["healthcheck"]["test"][0] == "CMD", (name, other)
            else:  # one that ends
                assert wait["condition"] == "service_completed_successfully"
                assert waited["restart"] == "on-failure", (name, other)


def test_images_are_targets_of_the_dockerfile() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    used = {each["build"]["target"] for each in (*OURS.values(), *GPU.values())}
    assert targets == used == {"server", "worker", "worker-gpu"}
    for each in (*OURS.values(), *GPU.values()):
        assert each["image"] == f"astraflow-{each['build']['target']}"
        assert (FOLDER / each["build"]["context"]).resolve() == FOLDER.parent
    for file in re.findall(r"requirements/\S+\.txt", dockerfile):
        assert (FOLDER.parent / file).is_file()
    for image in (each["image"] for name, each in SERVICES.items() if name not in OURS):
        assert ":" in image, f"{image} has no version"


def test_volumes_and_files_exist() -> None:
    for each in SERVICES.values():
        for volume in each.get("volumes", ()):
            source = volume.split(":")[0]
            exists = (
                (FOLDER / source).is_file()
                if source.startswith("./")
                else source in COMPOSE["volumes"]
            )
            assert exists, volume
        for config in each.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]


def test_each_variable_of_the_env_file_is_used_and_each_used_one_is_there() -> None:
    used = set(VARIABLE.findall((FOLDER / "compose.yaml").read_text()))
    assert used == set(ENV)
