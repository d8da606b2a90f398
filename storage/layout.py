"""Keys of the objects of a run, relative to its prefix. No other module builds a key.

runs/{run id}/                       models/{build digest}/          (shared by runs)
  run.json  stop.json  usage.json      manifest.json  model.safetensors  config.json  …
  prompts/{sha256}.arrow
  orders/00000007.json  orders/end.json
  leases/00000007.0000.json            promotions/{name}/         (shared by runs)
  shards/00000007.arrow                  00000001.json
  batches/solver/00000003.arrow          outcomes/{digest}.arrow
  weights/solver/00000003/manifest.json  since-00000000.json
  checkpoints/solver/00000003/manifest.json
  evals/solver-00000020_verifier-00000020.arrow
  eval_samples/solver-00000020_verifier-00000020.arrow
  heartbeats/rollout/rollout-us-east-0.json
  rounds/solver/00000003.json  00000003/{digest}.json
  tags/best.json                       nights/{name}/20260101-0200/plan.json  outcome.json
                                                                   starts/00000001.json
  quarantine/shards/00000007.arrow + .json
"""

import re
from collections.abc import Callable, Iterable, Mapping

from storage import plain_names
from storage.errors import ConfigError

RUNS = "runs"
MODELS = "models"
PROMOTIONS = "promotions"
NIGHTS = "nights"
RUN = "run.json"
STOP = "stop.json"
USAGE = "usage.json"
ORDERS, SHARDS, BATCHES, WEIGHTS = "orders", "shards", "batches", "weights"
LEASES, CHECKPOINTS, EVALS, HEARTBEATS, QUARANTINE = (
    "leases",
    "checkpoints",
    "evals",
    "heartbeats",
    "quarantine",
)
EVAL_SAMPLES = "eval_samples"
TAGS = "tags"
ROUNDS = "rounds"
PROMPTS = "prompts"
REPORT = "report.html"
FROZEN = "frozen.json"
"""While it exists, no version of the run is retired."""
RETIRED = "retired.json"
NAME = plain_names.NAME
"""Pattern of the names of policies, members and tags, which are parts of keys."""
_NUMBER = re.compile(r"\d{8,19}")
"""Numbers are below 2^63. A listing may have keys with thousands of digits."""
_RUN_FOLDER = re.compile(rf"(?:(?<=/)|\A){RUNS}/[^/]+/\Z")
_LEASE = re.compile(r"/(\d{8,19})\.(\d{4,19})\.json\Z")
_MERGED = re.compile(r"/(\d{8,19})/since-(\d{8,19})\.json")


def store_prefix(prefix: str) -> str:
    """Return the prefix of the store that a run's prefix is in; of another prefix, itself.

    Example: `runs/tiny-1/` → an empty one.
    """
    return _RUN_FOLDER.sub("", prefix)


def run_prefix(run_id: str) -> str:
    """Return the prefix of a run; ConfigError for an invalid run id."""
    if not plain_names.RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"{plain_names.quoted(run_id)} cannot be a run id; use up to 100 letters, digits, '.', "
            "'_' and '-', "
            "a letter or digit first"
        )
    return f"{RUNS}/{run_id}"


def model_prefix(build_digest: str) -> str:
    return f"{MODELS}/{build_digest}"


def promotions(name: str) -> str:
    """Return the folder of a promotion log; ConfigError for an invalid name."""
    return f"{PROMOTIONS}/{_checked_run_id(name, 'a promotion log')}"


def promotion(name: str, number: int) -> str:
    return f"{promotions(name)}/{number:08d}.json"


def prompts(digest: str) -> str:
    """Return the key of a run's frozen rows by their digest, `sha256:` and 64 hex digits."""
    return f"{PROMPTS}/{digest.removeprefix('sha256:')}.arrow"


def outcomes(name: str, digest: str) -> str:
    """Return the key of a team's outcomes on one data set, beside the decisions of the log."""
    return f"{promotions(name)}/outcomes/{digest}.arrow"


def nights(name: str) -> str:
    """Return the folder of a recurring training; ConfigError for an invalid name."""
    return f"{NIGHTS}/{_checked_run_id(name, 'a recurring training')}"


def nights_report(name: str) -> str:
    return f"{nights(name)}/{REPORT}"


def night(name: str, night_id: str) -> str:
    """Return the folder of one night: its plan, its outcome and its heartbeat."""
    return f"{nights(name)}/{_checked_run_id(night_id, 'a night')}"


def night_plan(name: str, night_id: str) -> str:
    return f"{night(name, night_id)}/plan.json"


def night_start(name: str, night_id: str, number: int) -> str:
    """Return the key of the record that a night was started again, for the `number`-th time."""
    return f"{night(name, night_id)}/starts/{number:08d}.json"


def night_outcome(name: str, night_id: str) -> str:
    return f"{night(name, night_id)}/outcome.json"


def order(number: int) -> str:
    return f"{ORDERS}/{number:08d}.json"


def orders_end() -> str:
    """Created once by the dataflow when it needs no further shard; workers stop when it exists."""
    return f"{ORDERS}/end.json"


def lease(number: int, attempt: int) -> str:
    return f"{LEASES}/{number:08d}.{attempt:04d}.json"


def leases(keys: Iterable[str]) -> list[tuple[int, int]]:
    """Return order and attempt, ascending, of the leases among `keys`."""
    return sorted(
        (int(order), int(attempt))
        for key in keys
        for order, attempt in _LEASE.findall(key)
        if key == lease(int(order), int(attempt))
    )


def shard(number: int) -> str:
    return f"{SHARDS}/{number:08d}.arrow"


def batch(policy: str, step: int) -> str:
    return f"{BATCHES}/{_checked_name(policy)}/{step:08d}.arrow"


def weights(policy: str, version: int) -> str:
    """Return the folder of one version, which contains its files and `manifest.json`."""
    return f"{WEIGHTS}/{_checked_name(policy)}/{version:08d}"


def policy_of_weights(key: str) -> str:
    """Return the policy to whose weights the key belongs; empty for another key.

    The key is relative to a run, or to the store where it belongs to another run.
    """
    parts = key.split("/")
    parts = parts[2:] if parts[0] == RUNS else parts
    return parts[1] if parts[0] == WEIGHTS and len(parts) > 2 else ""


def is_shard(key: str) -> bool:
    return key.startswith(f"{SHARDS}/")


def version_of(folder: str, policy: str) -> int | None:
    """Return the version of the policy to which the folder belongs; None for another folder."""
    digits = folder.rpartition("/")[2]
    if _NUMBER.fullmatch(digits) and folder == weights(policy, int(digits)):
        return int(digits)
    return None


def is_data_folder(folder: str, policy: str) -> bool:
    """Return whether the folder is that of a version or of a checkpoint of the policy."""
    digits = folder.rpartition("/")[2]
    return bool(_NUMBER.fullmatch(digits)) and folder in (
        weights(policy, int(digits)),
        checkpoint(policy, int(digits)),
    )


def retired(policy: str, version: int) -> str:
    """Created once, before the data files of the version are deleted; its manifest stays."""
    return f"{weights(policy, version)}/{RETIRED}"


def merged_delta(policy: str, version: int, base: int) -> str:
    """Created once, after the version: its changes since `base`, several versions before."""
    return f"{weights(policy, version)}/since-{base:08d}.json"


def merged_deltas(keys: Iterable[str], policy: str) -> dict[int, list[int]]:
    """Return version → bases, ascending, of the policy's merged deltas among `keys`."""
    bases: dict[int, list[int]] = {}
    for key in sorted(keys):
        for version, base in _MERGED.findall(key):
            if key == merged_delta(policy, int(version), int(base)):
                bases.setdefault(int(version), []).append(int(base))
    return bases


def checkpoint(policy: str, step: int) -> str:
    return f"{CHECKPOINTS}/{_checked_name(policy)}/{step:08d}"


def manifest(folder: str) -> str:
    return f"{folder}/manifest.json"


def evaluation(versions: Mapping[str, int]) -> str:
    return f"{EVALS}/{_vector(versions)}.arrow"


def evaluation_sample(versions: Mapping[str, int]) -> str:
    """Return the key of the episodes that are kept of an evaluation."""
    return f"{EVAL_SAMPLES}/{_vector(versions)}.arrow"


def heartbeat(kind: str, member: str) -> str:
    return f"{HEARTBEATS}/{kind}/{_checked_name(member)}.json"


def rounds(policy: str) -> str:
    """Return the folder of the rounds of a policy's trainer on several nodes."""
    return f"{ROUNDS}/{_checked_name(policy)}"


def round_start(policy: str, number: int) -> str:
    return f"{rounds(policy)}/{number:08d}.json"


def round_entry(policy: str, number: int, digest: str) -> str:
    return f"{rounds(policy)}/{number:08d}/{digest}.json"


def tag(name: str) -> str:
    return f"{TAGS}/{_checked_name(name)}.json"


def quarantine(key: str) -> str:
    """Return the key of the copy of the unreadable object `key`; the reason is at `{copy}.json`."""
    return f"{QUARANTINE}/{key}"


def _vector(versions: Mapping[str, int]) -> str:
    return "_".join(
        f"{_checked_name(policy)}-{versions[policy]:08d}" for policy in sorted(versions)
    )


def _checked_run_id(name: str, noun: str) -> str:
    """Return the name; ConfigError when it does not have the form of a run id."""
    if not plain_names.RUN_ID.fullmatch(name):
        raise ConfigError(
            f"{plain_names.quoted(name)} cannot name {noun}; use up to 100 letters, digits, '.', "
            "'_' and '-', a letter or digit first"
        )
    return name


def _checked_name(name: str) -> str:
    """Return the name; ConfigError when it cannot be a part of a key."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{plain_names.quoted(name)} cannot name a policy, a member or a tag; use up to 100 "
            "letters, digits, '_' and '-'"
        )
    return name


def numbers(keys: Iterable[str], key_of: Callable[[int], str]) -> list[int]:
    """Return the numbers n, ascending, whose key `key_of(n)` is among `keys`."""
    return sorted(
        {
            number
            for key in keys
            for number in map(int, _NUMBER.findall(key))
            if key_of(number) == key
        }
    )
