"""Settings of rollout workers, engines, workflows and sampling. Imports no torch."""

from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from storage.config_model import (
    ABSENT,
    Attempts,
    Context,
    Count,
    CountOrNone,
    Devices,
    Frozen,
    Gpus,
    Megabytes,
    OnlyWith,
    Seconds,
    SecondsOrNone,
    Share,
    Temperature,
    Threads,
    Tokens,
)
from storage.store.addresses import check_local_path, holds_credentials

DTYPES = ("float32", "bfloat16", "float16")
"""Compute dtypes of the engine `torch`."""
REGIONS_MAX = 1000
"""`status` and the page of a run show each of them."""


class SamplingConfig(Frozen):
    """Sampling of a policy's tokens."""

    temperature: Temperature = 1.0
    """0 is greedy; such tokens have log-probability 0 and cannot be trained on."""
    top_p: Share = 1.0
    """1: off. It must be off for a trained policy: log-probabilities are renormalised over the kept
    tokens.
    """
    top_k: CountOrNone = 0
    """0: off. It must be off for a trained policy, too."""
    max_new_tokens: Tokens = 256


class WorkflowConfig(Frozen):
    """The workflow, its roles and its reward."""

    name: str = "single_turn"
    """A built-in's name or an import path `package.module:Name`."""
    args: dict[str, Any] = {}
    """Passed to the workflow's constructor."""
    roles: dict[str, str] = {}
    """Role → policy, where the names differ: `{verifier: solver}` uses one policy for both."""
    timeout_s: Seconds = 120.0
    """Time limit of an episode; a longer one is cut and has failed."""
    reward: str = "math"
    """The reward: a built-in's name or an import path."""
    reward_timeout_s: Seconds = 5.0
    """Limit of the CPU seconds for judging one answer; beyond it the episode has failed."""


def _check_server_url(url: str) -> str:
    if not (url.isascii() and url.isprintable()):  # urlsplit drops some characters silently
        raise ValueError("must not contain control characters or letters outside of ASCII")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port
        is_here = parts.hostname in ("127.0.0.1", "::1")
    except ValueError:
        is_address = is_here = False
    if not (is_address and is_here):
        raise ValueError(
            "must be an address of this machine with a port, such as http://127.0.0.1:30000: the "
            "server reads new weights from this machine's memory"
        )
    if holds_credentials(url):
        raise ValueError(
            "contains a user, a password or a token, and recipes are stored; set "
            "ASTRAFLOW_SGLANG_API_KEY instead"
        )
    return url


ServerUrl: TypeAlias = Annotated[str, AfterValidator(_check_server_url)]

SERVER_ARGS = frozenset(
    (
        *("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"),
        *("--triton-attention-num-kv-splits", "--triton-attention-reduce-in-fp32"),
        "--sampling-backend",
        *("--quantization", "--kv-cache-dtype", "--fp8-gemm-backend", "--fp4-gemm-backend"),
        *("--bf16-gemm-backend", "--enable-fp32-lm-head", "--enable-tf32-matmul"),
        *("--enable-deterministic-inference", "--rl-on-policy-target", "--random-seed"),
        *("--max-total-tokens", "--max-prefill-tokens", "--max-queued-requests", "--page-size"),
        *("--chunked-prefill-size", "--prefill-max-requests", "--enable-mixed-chunk"),
        *("--schedule-policy", "--schedule-conservativeness", "--num-continuous-decode-steps"),
        *("--disable-overlap-schedule", "--disable-radix-cache", "--radix-eviction-policy"),
        *("--swa-full-tokens-ratio", "--cpu-offload-gb", "--enable-memory-saver", "--numa-node"),
        *("--disable-cuda-graph", "--disable-cuda-graph-padding", "--enable-torch-compile"),
        *("--cuda-graph-max-bs", "--cuda-graph-bs", "--cuda-graph-max-bs-decode"),
        *("--cuda-graph-bs-decode", "--torch-compile-max-bs", "--enable-two-batch-overlap"),
        *("--disable-custom-all-reduce", "--enable-nccl-nvls", "--enable-symm-mem"),
        *("--enable-mscclpp", "--enable-torch-symm-mem", "--enable-flashinfer-allreduce-fusion"),
        *("--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size"),
        *("--ep-size", "--expert-parallel-size"),
        *("--moe-a2a-backend", "--moe-runner-backend", "--moe-dense-tp-size", "--deepep-mode"),
        *("--enable-eplb", "--ep-num-redundant-experts", "--disable-shared-experts-fusion"),
        *("--mamba-backend", "--mamba-ssm-dtype", "--max-mamba-cache-size"),
        *("--lora-backend", "--max-loras-per-batch", "--max-lora-chunk-size"),
        *("--watchdog-timeout", "--stream-interval", "--sleep-on-idle"),
    )
)
"""Arguments of SGLang that a recipe may set: speed, memory and numerics. The engine sets others;
among the rest are some that open the server to others, name files or run code: with
`--enable-dp-attention` its processes unpickle what any user of the machine sends to their ports.
"""


def _check_no_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a null character")
    return text


def _check_server_arg(arg: str) -> str:
    _check_no_null(arg)
    flag = arg.partition("=")[0].replace("_", "-")
    if flag.startswith("--") and flag not in SERVER_ARGS:
        raise ValueError(
            f"{flag} is not for recipes: the engine sets it, or it may open the server to others, "
            "name files or run code; leave it out, or start a server with it and name that in urls"
        )
    return arg


ServerArg: TypeAlias = Annotated[str, AfterValidator(_check_server_arg)]


class SglangConfig(Frozen):
    """The SGLang servers of the engine `sglang`: its own, or running ones by URL."""

    python: Annotated[
        str,
        AfterValidator(_check_no_null),
        AfterValidator(check_local_path),
        OnlyWith("urls", ABSENT),
    ] = ""
    """Python interpreter of the environment in which sglang is installed; empty: the worker's.
    Where ASTRAFLOW_IMPORT_ALLOW is set on the worker, it must allow `sglang` for this setting and
    for `server_args`.
    """
    tensor_parallel: Devices = 1
    """Devices over which each layer of the model is divided."""
    memory_share: Annotated[Share | None, OnlyWith("urls", ABSENT)] = None
    """Share of a device's memory for the weights and the KV cache of one server; none: the servers
    on a device get equal parts of `device_share`, and a server that is alone there decides itself.
    """
    kv_cache: Literal["keep", "recompute", "drain"] = "keep"
    """Running answers at new weights. `keep`: they continue, with the keys and values that older
    weights computed. `recompute`: they continue, and the new weights compute all keys and values
    again. `drain`: they end first, so that one version samples a whole answer.
    """
    check_every: CountOrNone = 20
    """Versions between two comparisons of the tensors that a server holds with those it was given.
    About 1 GiB of them is loaded again each time, in turn, and all of them after a start; 0: never.
    """
    adapter_rank: CountOrNone = 0
    """Largest rank of adapters that the servers apply themselves (`train.adapter.publish:
    adapter`); 0: they get merged weights. Running answers then keep their adapter, whatever
    `kv_cache` is.
    """
    server_args: Annotated[tuple[ServerArg, ...], OnlyWith("urls", ABSENT)] = ()
    """Further arguments of `sglang.launch_server`: `[--attention-backend, fa3]`."""
    shared: bool = False
    """One server, or the set of `urls`, for all policies of a worker: they have one base model and
    publish adapters (`train.adapter.publish: adapter`), and each request names the one of its
    policy. Needs `adapter_rank`. The server decodes `max_concurrent` sequences for each policy.
    false: a server for each policy.
    """
    urls: tuple[ServerUrl, ...] = ()
    """Servers that run already on the worker's machine (`http://127.0.0.1:30000`), for this worker
    alone. Their API key is in the environment variable ASTRAFLOW_SGLANG_API_KEY. Empty: the worker
    starts its own server. `device`, `dtype` and `tensor_parallel` describe these servers, to
    `astraflow doctor` only.
    """


_OWN_SERVERS = OnlyWith("sglang.urls", ABSENT)


class EngineConfig(Frozen):
    """The rollout engine."""

    name: str = "torch"
    """A built-in's name or an import path."""
    device: str = "cpu"
    devices: Annotated[Gpus, OnlyWith("device", "cuda"), _OWN_SERVERS] = ()
    """GPUs of a worker: `sglang.tensor_parallel` of them (else one) for each policy, in the order
    of the recipe's `policies`, or for all policies together; empty: the first ones, for all
    together. CUDA_VISIBLE_DEVICES of the pool's worker limits them: they are counted among those
    that it lists.
    """
    device_share: Annotated[Share, OnlyWith("device", "cuda"), _OWN_SERVERS] = 1.0
    """Share of each of its GPUs that a worker may use. Processes whose shares add up to more than 1
    never use one GPU together: one of them waits. Only the engine `sglang` enforces it.
    """
    dtype: str = "float32"
    """Compute dtype; bfloat16 is slower than float32 on most CPUs."""
    threads: Annotated[
        Threads, OnlyWith("device", "cpu", where=OnlyWith("name", "sglang")), _OWN_SERVERS
    ] = 1
    """Compute threads of one engine on a CPU."""
    max_concurrent: Count = 64
    """Sequences decoded together."""
    max_tokens: Context = 512
    """Longest context (prompt and answer) of a sequence; determines the size of the KV cache."""
    sglang: Annotated[SglangConfig, OnlyWith("name", "sglang")] = SglangConfig()
    """Settings of the engine `sglang` alone."""


def _check_deployment(name: str) -> str:
    if name and not (name.isprintable() and name.count("/") == 1 and all(name.split("/"))):
        raise ValueError("must be written as FLOW/DEPLOYMENT, as `prefect deployment ls` lists it")
    return name


class RegionConfig(Frozen):
    """Workers of one region."""

    workers: CountOrNone = 1
    deployment: Annotated[str, AfterValidator(_check_deployment), OnlyWith("workers")] = ""
    """The Prefect deployment that starts a worker there; empty: `rollout/worker`, in the work queue
    with the region's name.
    """
    mirror: Annotated[str, OnlyWith("workers")] = ""
    """URL of a store in the region (`s3://bucket-eu/prefix?endpoint=https://host&profile=eu`, or a
    path) with a copy of the weights for its workers; empty: they read from the run's own store.
    Endpoint and profile default to the environment, as for the run's store. The URL has no
    credentials, since it is stored with the run.
    """


class RolloutConfig(Frozen):
    """All settings of rollout workers."""

    workflow: WorkflowConfig = WorkflowConfig()
    engine: EngineConfig = EngineConfig()
    regions: Annotated[dict[str, RegionConfig], Field(max_length=REGIONS_MAX)] = {
        "default": RegionConfig()
    }
    """Region → its workers. Any name of letters, digits, - and _ can be a region."""
    orders_ahead: Count = 2
    """Orders that a worker runs concurrently; two keep its engine busy while one ends."""
    lease_ttl_s: Seconds = 20.0
    """Time to live of a lease; without a renewal the order is then open to other workers."""
    lease_attempts_max: Attempts = 5
    """Number of lost leases after which an order gets failed episodes instead of another retry."""
    drain_s: SecondsOrNone = 15.0
    """On SIGTERM: time to finish leased orders before they are given back."""
    poll_interval_s: Seconds = 0.2
    """Pause between two polls for orders while there are none."""
    refresh_memory_mb: Megabytes = 1024
    """Host memory for reading weights, in addition to the loaded version and the next one."""
    refresh_interval_s: Seconds = 0.2
    """Pause between two polls for new weights."""
