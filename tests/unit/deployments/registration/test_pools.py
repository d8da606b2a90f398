import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.registration import pools
from storage.errors import ConfigError

MINE = """\
rollout:
  type: kubernetes
  concurrency: 16
  environment: {HF_HUB_OFFLINE: "1"}
  job_variables:
    image: registry.example/astraflow:1.0
  regions:
    eu-west: {concurrency: 8}
    us-east: {}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "pools.yaml"
    path.write_text(text)
    return path


def test_the_built_in_file_has_the_three_pools_of_processes() -> None:
    loaded = pools.load()
    assert set(loaded) == set(pools.NAMES)
    assert {pool.type for pool in loaded.values()} == {"process"}
    assert all(pool.description for pool in loaded.values())


def test_a_file_of_pools_is_read_with_its_regions(tmp_path: Path) -> None:
    (pool,) = pools.load(written(tmp_path, MINE)).values()
    assert (pool.type, pool.concurrency) == ("kubernetes", 16)
    assert pool.environment == {"HF_HUB_OFFLINE": "1"}
    assert pool.job_variables == {"image": "registry.example/astraflow:1.0"}
    limits = {region: queue.concurrency for region, queue in pool.regions.items()}
    assert limits == {"eu-west": 8, "us-east": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollouts: {}", "line 1: rollouts: is no pool of AstraFlow; use control, trainers, roll"),
        ("control:\n  concurrency: 0", "line 2: control.concurrency: Input should be greater"),
        ("control:\n  concurency: 1", "line 2: control.concurency: Extra inputs"),
        ("control: 3", "line 1: control: Input should be a valid dictionary"),
        ("- control", "line 1: the file: Input should be a valid dictionary"),
        (
            "trainers:\n  job_variables:\n    command: rm",
            "line 3: trainers.job_variables.command: is set by AstraFlow",
        ),
        (
            "trainers:\n  environment:\n    AWS_SECRET_ACCESS_KEY: x",
            "line 3: trainers.environment.AWS_SECRET_ACCESS_KEY: is a secret",
        ),
        (
            "trainers:\n  environment:\n    PROXY: https://me:s3cr3t@example.org",
            "line 3: trainers.environment.PROXY: is a secret",
        ),
        (
            "trainers:\n  environment:\n    hf_token: x",
            "line 3: trainers.environment.hf_token: is a secret",
        ),
        (
            "trainers:\n  job_variables:\n    volumes: [{from: 's3://me:s3cr3t@bucket'}]",
            "line 3: trainers.job_variables.volumes: is a secret",
        ),
        *(
            (
                f"trainers:\n  environment:\n    {name}: x",
                f"line 3: trainers.environment.{name}: is",
            )
            for name in ("AZURE_CLIENT_SECRET", "DB_PASSWD", "SSH_PRIVATE_KEY", "MINIO_SECRET_KEY")
        ),
        *(
            (
                f"trainers:\n  job_variables:\n    box: {box}",
                "line 3: trainers.job_variables.box: is",
            )
            for box in (
                "{environment: {AWS_SECRET_ACCESS_KEY: s3cr3t}}",
                "[{name: HF_TOKEN, value: s3cr3t}]",
                "{a: [{b: ['WANDB_API_KEY=s3cr3t']}]}",
                "PGPASSWORD=s3cr3t",
                "[--api-key=s3cr3t]",
                "!!omap [HF_TOKEN: {HF_TOKEN: s3cr3t}]",
            )
        ),
        (
            "trainers:\n  job_variables:\n    GITHUB_TOKEN: s3cr3t",
            "line 3: trainers.job_variables.GITHUB_TOKEN: is a secret",
        ),
        (
            "trainers:\n  job_variables:\n    cpus: .nan",
            "line 3: trainers.job_variables.cpus: is nan, which is no number in JSON",
        ),
        (
            "trainers:\n  job_variables:\n    image: !!binary aGVsbG8=",
            "line 3: trainers.job_variables.image: is a bytes, for which JSON has no type",
        ),
        (
            'trainers:\n  environment:\n    A: "a\\0"',
            "line 3: trainers.environment.A: has a NUL, which no process",
        ),
        (
            'trainers:\n  job_variables:\n    command: {a: ["a\\0"]}',
            "line 3: trainers.job_variables.command: has a NUL",
        ),
        ('trainers:\n  description: "a\\0"', "line 2: trainers.description: has a NUL"),
        (
            'trainers:\n  description: "\\ud800"',
            "line 2: trainers.description: has the lone surrogate",
        ),
        ('trainers:\n  type: ""', "line 2: trainers.type: '' cannot be a type of work pool"),
        ('trainers:\n  type: "  "', "line 2: trainers.type: '  ' cannot be a type"),
        ('trainers:\n  type: "a\\eb"', r"line 2: trainers.type: 'a\x1bb' cannot be a type"),
        ('trainers:\n  type: "a\\0"', r"line 2: trainers.type: 'a\x00' cannot be a type"),
        ("trainers:\n  environment:\n    A=B: x", "line 3: trainers.environment.A=B"),
        ("control:\n  regions: {eu: {}}", "line 2: control.regions: only rollout has regions"),
        ("rollout:\n  regions:\n    ../x: {}", "line 3: rollout.regions.../x: cannot be the name"),
        ("a: [", "line 1: not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        pools.load(path)
    assert str(raised.value).startswith(f"{path}, {message}"), raised.value
    assert "s3cr3t" not in str(raised.value)


def test_the_name_of_a_secret_of_the_cluster_is_no_secret(tmp_path: Path) -> None:
    text = (
        "rollout:\n"
        "  environment: {ASTRAFLOW_STORE_SECRET: store-keys, HF_TOKEN_PATH: /run/token}\n"
        "  job_variables:\n"
        "    automountServiceAccountToken: false\n"
        "    from:\n"
        "    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: keys, key: hf}}}\n"
        "    - {name: HF_TOKEN, value: ''}\n"
        "    - {name: [HF_TOKEN], value: x}\n"
    )
    assert pools.load(written(tmp_path, text))["rollout"].job_variables["from"]


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read as a file of work pools"):
        pools.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_something_else_in_the_place_of_the_file_is_named_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "pools.yaml")
    with pytest.raises(ConfigError, match=r"pools\.yaml is not a file; name a file of work pools"):
        pools.load(tmp_path / "pools.yaml")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_an_impossible_path_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a file of work pools"):
        pools.load(tmp_path / name)


def test_no_more_than_the_limit_of_a_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "pools.yaml").open("wb") as file:
        file.truncate(2**40)  # without a block on the disk
    with pytest.raises(ConfigError, match=r"pools\.yaml: larger than 200,000 bytes"):
        pools.load(tmp_path / "pools.yaml")
