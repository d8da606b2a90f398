"""What flows between the rooms: a handful of frozen records, each with the length of its arrays.

    Prompt ──▶ Order ──▶ Shard ⊃ Group ⊃ Episode ⊃ Sequence ──▶ Batch ⊃ Row ──▶ Manifest

Shape legend: L tokens of one sequence. This module knows nothing of files, schemas or training; the Arrow and JSON forms
stand in `shards.py`, `batches.py`, `orders.py` and `weights.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias
from weakref import ReferenceType

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from storage.json_numbers import Count, Number, Quantity, UnixTime
from storage.plain_names import DataFileName, DataFileNameOrNone, PartName

Int8: TypeAlias = NDArray[np.int8]
Int32: TypeAlias = NDArray[np.int32]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]
Json: TypeAlias = dict[str, Any]

DIMENSIONS_MAX = 64
"""NumPy's own bound."""
Dtype: TypeAlias = Annotated[str, Field(pattern=r"\A(BF16|F(16|32|64)|F8_E4M3|F8_E5M2|[IU](8|16|32|64)|BOOL)\z")]
"""safetensors' name, in an object that is read."""
Shape: TypeAlias = Annotated[tuple[Count, ...], Field(max_length=DIMENSIONS_MAX)]

NOBODY = -1
"""In `Sequence.owners` and `Sequence.versions`: a prompt, tool or environment token, which nobody sampled."""

FinishReason = Literal["stop", "length", "abort"]
Fate = Literal["trained", "replayed", "filtered", "expired", "waiting"]
"""What became of a sequence for one policy. `waiting` is not final; a batch lists what still waits after it."""


@dataclass(frozen=True)
class Prompt:
    """One problem. Example: `Prompt("chained_addition/train/17", {"question": "7+8-3=?", "answer": "12"})`."""

    id: str
    """Unique within the run's prompt source."""
    fields: Json
    """At least `question`; whatever else the source's columns hold (`answer`, tests, …)."""


@dataclass(frozen=True)
class Order:
    """The unit of rollout work. Example: `Order(0, (prompt,), samples_per_prompt=8, seed=0, seen=(), cursor={"next": 1})`."""

    number: Count
    """0, 1, 2, … without gaps."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: Count
    """Episodes of each prompt: the size of a group."""
    seed: Count
    """Every random number of the order's episodes derives from it."""
    seen: tuple[Count, ...]
    """Orders whose shards the dataflow took in since it wrote the order before: curators fold over these, in this order."""
    cursor: Json
    """Where the prompt source stands after this order; a restarted dataflow goes on from the newest order's cursor."""
    created_s: UnixTime = 0.0
    """Unix time, seconds; a hint for reports."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """The tokens of one model context. A prompt of two tokens and an answer of three, sampled by policy 0 at version 4:

    tokens    [11, 12, 40, 41,  2]      owners   [-1, -1, 0, 0, 0]
    loss_mask [ F,  F,  T,  T,  T]      versions [-1, -1, 4, 4, 4]
    """

    tokens: Int32
    """[L] exactly what the engine consumed and produced."""
    loss_mask: Bool
    """[L] True on tokens that may be trained on; only ever True where `owners` is a policy."""
    logprobs: Float32
    """[L] natural log-probability under the sampling distribution (after temperature, top-k, top-p); 0 where nobody sampled."""
    owners: Int8
    """[L] index into `policies` of the policy that sampled the token, or NOBODY."""
    versions: Int32
    """[L] weights version that sampled the token, or NOBODY."""
    policies: tuple[str, ...]
    """Names that `owners` indexes."""
    reward: float
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    starts_episode: bool = False
    """True on the first sequence of its episode."""
    name: str = ""
    """The workflow's word for this context: `attempt`, `verdict`, `retry`, …"""
    finish_reason: FinishReason = "stop"
    """How the last generation in the sequence ended."""

    def min_version(self, policy: str) -> int:
        """The oldest version that sampled a token of `policy` here; raises ValueError when it owns none."""
        own = self.owners == self.policies.index(policy)
        return int(self.versions[own].min())


@dataclass(frozen=True)
class Episode:
    """One play of the workflow. A failed one carries `error` and usually no sequences."""

    sequences: tuple[Sequence, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workflow measured. Math workflows set `first_attempt` and `final` to 1.0 or 0.0 (correct or not)."""
    error: str | None = None
    """`Kind: message` of what the play raised, or `timeout after 60 s`."""
    seconds: float = 0.0
    """Wall-clock from start to end of the play."""


@dataclass(frozen=True)
class Group:
    """All episodes of one prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class Shard:
    """The result of one order."""

    order: int
    attempt: int
    """Lease attempt under which it was made."""
    worker: str
    region: str
    groups: tuple[Group, ...]
    """One for each prompt of the order, in the order's order."""
    weights: Mapping[str, Mapping[int, str]]
    """policy → version → digest of the tensors the worker held, for every version that sampled a token of the shard."""
    started_s: float
    finished_s: float
    """Unix times by the worker's clock; for reports, never for correctness."""


class SequenceKey(NamedTuple):
    """Where a sequence stands in the run: its provenance. Example: order 7, prompt 2 of it, sample 5, second sequence."""

    order: int
    group: int
    episode: int
    sequence: int


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence of a batch, already masked to the batch's policy."""

    key: SequenceKey
    prompt_id: str
    tokens: Int32
    """[L]"""
    loss_mask: Bool
    """[L] True on the policy's own tokens that are trained on."""
    logprobs: Float32
    """[L] behaviour log-probabilities; 0 where `loss_mask` is False."""
    versions: Int32
    """[L] version that sampled the token; NOBODY where `loss_mask` is False."""
    advantages: Float32
    """[L] 0 where `loss_mask` is False."""
    reward: float
    temperature: float
    min_version: int
    """Oldest version over the policy's own tokens."""
    replay: bool = False
    """A replay algorithm asked for the sequence again."""


class Entry(NamedTuple):
    """A line of the books: what became of one sequence for one policy. Example: `Entry(key, "filtered", "zero_advantage")`."""

    key: SequenceKey
    fate: Fate
    reason: str
    """Of `filtered`: the filter's name, or the dataflow's own `failed_episode`, `not_finite`,
    `untrainable`, `partial_group`, `no_trained_token` or `unreadable_shard`. Of `expired`: `max_staleness`. Never empty."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one policy trains on in one step, and the books since the batch before."""

    policy: str
    step: int
    """1, 2, 3, …: batch n turns version n−1 into version n."""
    rows: tuple[Row, ...]
    ledger: tuple[Entry, ...]
    """Final fates since the batch before, other than `trained` and `replayed` (those are the rows)."""
    waiting: tuple[SequenceKey, ...]
    """What still waits after this batch, in arrival order: with `closed_below` and `closed` all a restart needs."""
    shards: tuple[int, ...]
    """Orders taken in for this policy since the batch before, in the order they were taken in."""
    closed_below: int
    """Every order below this one has been taken in."""
    closed: tuple[int, ...]
    """Orders at or above `closed_below` that have been taken in too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`dataflow/…` metrics of this batch."""
    created_s: float = 0.0


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor as bits in host memory, free of torch. Example: bf16 [2, 3] → `HostTensor("BF16", (2, 3), uint16 [2, 3])`."""

    dtype: str
    """safetensors' name: BF16, F16, F32, I64, U8, …"""
    shape: tuple[int, ...]
    bits: NDArray[Any]
    """C-contiguous, of `shape`; unsigned integer of the element's width for BF16/F16/F32 (the bit pattern), else its own
    dtype."""
    difference: "Difference | None" = field(default=None, repr=False)
    """What its maker knows of how it differs from an older tensor. It saves a comparison; the bits alone are the truth."""


@dataclass(frozen=True, eq=False)
class Difference:
    """How a tensor differs from `base`. Example: bits [5, 7, 9], before [5, 8, 9] → `positions` [1], `steps` [65535]."""

    base: "ReferenceType[HostTensor]"
    """Weak, so that a tensor keeps none of those before it alive."""
    positions: NDArray[np.uint64]
    """[n] of all elements that differ and of no others, in the flat tensor, ascending."""
    steps: NDArray[Any]
    """[n] new − old, wrapping; unsigned, of the element's width."""


@dataclass(frozen=True)
class TensorInfo:
    dtype: Dtype
    shape: Shape
    digest: str
    """`xxh3_128:` + hex over the tensor's little-endian bytes."""
    file: DataFileNameOrNone
    """Where its bytes, or its change, lie; empty when its bits are those of `source`."""
    entry: str = ""
    """Its name in that file, when that is not its own: tied tensors share one entry."""
    source: str = ""
    """In a delta: the base's tensor that it comes from. Empty for a tensor that is there as a whole."""


@dataclass(frozen=True)
class FileInfo:
    name: DataFileName
    """With the id of its writer: `{write id}.config.json`."""
    num_bytes: Count
    digest: str
    """`sha256:` + hex over the whole file."""


@dataclass(frozen=True)
class Step:
    """How a version's tensors come from those of an older one."""

    base: int
    """The older version."""
    tensors: Mapping[str, TensorInfo]
    """As in the version's manifest, but `file`, `entry` and `source` tell the way from `base`."""
    files: tuple[FileInfo, ...]


@dataclass(frozen=True)
class Merged:
    """`weights/{policy}/{version}/since-{base}.json`: a way that passes over the versions in between. Created once."""

    policy: PartName
    version: int
    step: Step
    created_s: Number = 0.0
    write_id: str = ""


@dataclass(frozen=True)
class Manifest:
    """One version of one policy's weights; the last object written of it, created once."""

    policy: PartName
    version: int
    parent: int | None
    """version − 1; None for version 0."""
    batch: int | None
    """The batch that made it (= version); None for version 0."""
    kind: Literal["anchor", "delta"]
    base: int | None
    """The version a delta is applied to; None for an anchor."""
    digest: str
    """`sha256:` over the sorted `name dtype shape tensor-digest` lines: equal digests mean bit-equal weights."""
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]
    """Tensor files. Version 0 lists the model's other files too (`config.json`, tokenizer, …)."""
    step: Step | None = None
    """Of an anchor: how it also comes from the version before, for those who hold that."""
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """`trainer/…` metrics of the step that made it."""
    created_s: UnixTime = 0.0
    write_id: str = ""


@dataclass(frozen=True)
class Lease:
    """A worker's claim on an order."""

    order: Count
    attempt: Count
    """Leases on the order before this one, however they ended."""
    worker: str
    region: str
    lost: Count = 0
    """How many of those expired: their workers were killed or cut off, maybe by the order itself."""
    renewals: Count = 0
    """Counts up at every renewal. Others judge a lease by watching this number on their own clock, so clocks need not agree."""
    released: bool = False
    """Given back: the next attempt is open at once."""
    write_id: str = ""


@dataclass(frozen=True)
class OrdersEnd:
    """No further shard is needed: every policy has all of its batches."""

    orders: int
    """Orders that the writer knows of; a hint."""


@dataclass(frozen=True)
class Heartbeat:
    """What a service says of itself every few seconds. A hint: overwritten, never the base of a correctness decision."""

    kind: Literal["supervisor", "base_model", "dataflow", "rollout", "trainer", "evaluation", "mirror"]
    id: PartName
    """`dataflow`, `trainer-solver`, `rollout-us-east-0`, …: the member's name, stable over restarts."""
    attempt: Count
    """Which launch of the member this is."""
    beats: Count
    beat_s: UnixTime
    """Unix time of this beat."""
    started_s: UnixTime
    pid: Count
    host: str
    state: str
    """`starting`, `working`, `waiting`, `draining`, `done`, `failed`; a supervisor's also a step after the run's end."""
    region: str = ""
    progress: Mapping[str, Quantity] = field(default_factory=dict)
    """Counters: `orders_done`, `episodes`, `tokens`, `step`, `closed_below`, …"""
    rates: Mapping[str, Quantity] = field(default_factory=dict)
    """Gauges: `tokens_per_s`, `running`, …"""
    seconds: Mapping[str, Quantity] = field(default_factory=dict)
    """Cumulative wall seconds by component: `wait`, `step`, `publish`, `generate`, `store`, …; and `cpu` of the process."""
    versions: Mapping[str, Count] = field(default_factory=dict)
    """policy → version held."""
    note: str = ""
    """The last thing worth telling a person."""


@dataclass(frozen=True)
class Stop:
    """The run has ended, or shall. Services drain and leave when they see it."""

    state: Literal["completed", "cancelled", "failed"]
    reason: str
    at_s: UnixTime
