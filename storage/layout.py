"""Where the objects of a run lie. The only module that spells a key; everything is relative to the
run's prefix.

runs/{run id}/                       models/{build digest}/          (shared by runs)
  run.json  stop.json                  manifest.json  model.safetensors  config.json  …
  orders/00000007.json  orders/end.json
  leases/00000007.0000.json
  shards/00000007.arrow
  batches/solver/00000003.arrow
  weights/solver/00000003/manifest.json  since-00000000.json
  checkpoints/solver/00000003/manifest.json
  evals/solver-00000020_verifier-00000020.arrow
  heartbeats/rollout/rollout-us-east-0.json
  tags/best.json
  quarantine/shards/00000007.arrow + .json
"""

import re
from collections.abc import Callable, Iterable, Mapping

from storage import plain_names
from storage.errors import ConfigError

RUNS = "runs"
MODELS = "models"
RUN = "run.json"
STOP = "stop.json"
ORDERS, SHARDS, BATCHES, WEIGHTS = "orders", "shards", "batches", "weights"
LEASES, CHECKPOINTS, EVALS, HEARTBEATS, QUARANTINE = (
    "leases",
    "checkpoints",
    "evals",
    "heartbeats",
    "quarantine",
)
TAGS = "tags"
REPORT = "report.html"
FROZEN = "frozen.json"
"""While it stands, nothing of the run is retired."""
RETIRED = "retired.json"
NAME = plain_names.NAME
"""What policies, members and tags may be called, because their names are parts of keys."""
_NUMBER = re.compile(r"\d{8,19}")
"""Numbers lie below 2^63. A server that nobody controls may list keys with thousands of digits."""
_MERGED = re.compile(r"/(\d{8,19})/since-(\d{8,19})\.json")


def run_prefix(run_id: str) -> str:
    """ConfigError for what cannot be a run id."""
    if not plain_names.RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"{plain_names.quoted(run_id)} cannot be a run id; use up to 100 letters, digits, '.', "
            "'_' and '-', "
            "a letter or digit first"
        )
    return f"{RUNS}/{run_id}"


def model_prefix(build_digest: str) -> str:
    return f"{MODELS}/{build_digest}"


def order(number: int) -> str:
    return f"{ORDERS}/{number:08d}.json"


def orders_end() -> str:
    """Created once by the dataflow when it needs no further shard; workers leave when they see
    it.
    """
    return f"{ORDERS}/end.json"


def lease(number: int, attempt: int) -> str:
    return f"{LEASES}/{number:08d}.{attempt:04d}.json"


def shard(number: int) -> str:
    return f"{SHARDS}/{number:08d}.arrow"


def batch(policy: str, step: int) -> str:
    return f"{BATCHES}/{_named(policy)}/{step:08d}.arrow"


def weights(policy: str, version: int) -> str:
    """The folder of one version; its files and `manifest.json` lie below."""
    return f"{WEIGHTS}/{_named(policy)}/{version:08d}"


def policy_of_weights(key: str) -> str:
    """The policy to whose weights the key belongs; empty when it belongs to none's."""
    parts = key.split("/")
    return parts[1] if parts[0] == WEIGHTS and len(parts) > 2 else ""


def is_shard(key: str) -> bool:
    return key.startswith(f"{SHARDS}/")


def version_of(folder: str, policy: str) -> int | None:
    """The version of the policy whose folder this is; None when it is none's."""
    number = folder.rpartition("/")[2]
    return (
        int(number)
        if _NUMBER.fullmatch(number) and folder == weights(policy, int(number))
        else None
    )


def retired(policy: str, version: int) -> str:
    """Created once, before the version's data files are deleted on purpose; its manifest stays."""
    return f"{weights(policy, version)}/{RETIRED}"


def merged_delta(policy: str, version: int, base: int) -> str:
    """Created once, after the version: how it comes from `base`, some versions before."""
    return f"{weights(policy, version)}/since-{base:08d}.json"


def merged_deltas(keys: Iterable[str], policy: str) -> dict[int, list[int]]:
    """version → bases, ascending, of the policy's merged changes among `keys`."""
    found: dict[int, list[int]] = {}
    for key in sorted(keys):
        for version, base in _MERGED.findall(key):
            if key == merged_delta(policy, int(version), int(base)):
                found.setdefault(int(version), []).append(int(base))
    return found


def checkpoint(policy: str, step: int) -> str:
    return f"{CHECKPOINTS}/{_named(policy)}/{step:08d}"


def manifest(folder: str) -> str:
    return f"{folder}/manifest.json"


def evaluation(versions: Mapping[str, int]) -> str:
    vector = "_".join(f"{_named(policy)}-{versions[policy]:08d}" for policy in sorted(versions))
    return f"{EVALS}/{vector}.arrow"


def heartbeat(kind: str, member: str) -> str:
    return f"{HEARTBEATS}/{kind}/{_named(member)}.json"


def tag(name: str) -> str:
    return f"{TAGS}/{_named(name)}.json"


def quarantine(key: str) -> str:
    """Where a copy of the unreadable object `key` goes; its reason stands beside it in
    `{this}.json`.
    """
    return f"{QUARANTINE}/{key}"


def _named(name: str) -> str:
    """The name, fit to be a part of a key; ConfigError when it is not."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{plain_names.quoted(name)} cannot name a policy, a member or a tag; use up to 100 "
            "letters, digits, '_' and '-'"
        )
    return name


def numbers(keys: Iterable[str], spell: Callable[[int], str]) -> list[int]:
    """The numbers n, ascending, whose key `spell(n)` is among `keys`; whatever else lies there is
    no object of the run.
    """
    return sorted(
        {
            number
            for key in keys
            for number in map(int, _NUMBER.findall(key))
            if spell(number) == key
        }
    )
