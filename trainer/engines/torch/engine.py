"""The built-in train engine: a transformers model with float32 master weights and AdamW on one
device.

    batch ─▶ minibatches ─▶ micro-batches ─▶ blocks
             one optimizer  one backward     one forward
             step each      pass each        pass each

`packing.py` forms the blocks, `trainer/losses/` has the loss, this module accumulates gradients and
takes optimizer steps. Micro-batches do not change the gradient: all weights and constants of the
loss are computed over the whole minibatch first.

Shape legend: N loss tokens of a micro-batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from storage.errors import CorruptError
from storage.formats.json_objects import build, dump
from storage.records.batches import Batch
from storage.records.numbers import Count
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.torch import rng_state
from trainer.engines.torch.changed_elements import DeviceScan
from trainer.engines.torch.hf_model import HfModel
from trainer.engines.torch.host_tensors import NAMES, to_host, to_torch
from trainer.engines.torch.logprobs import token_logprobs
from trainer.engines.torch.minibatches import batch_advantages, check_rows, minibatches
from trainer.engines.torch.packing import Block, PackedRow, pack, plan
from trainer.engines.torch.rng_state import RandomStates
from trainer.engines.torch.step_metrics import StepMetrics
from trainer.losses.loss import Prepared, check_token_loss

STATE_FORMAT = 1
SECOND_MOMENT = "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT)


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The JSON that `TorchTrainEngine.save` returns."""

    format: Literal[1]
    updates: Mapping[str, Count]
    """Parameter → its optimizer steps; parameters without one are left out."""
    rng: RandomStates


@dataclass(frozen=True, eq=False, kw_only=True)
class _Tokens:
    """Loss tokens of a micro-batch on the device, in the order of its blocks; [N] each."""

    logprobs_N: Tensor
    entropy_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weight_N: Tensor


class TorchTrainEngine:
    """Train engine on one torch device (contract: `trainer/engines/engine.py`)."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._model_config = model_config
        self._seed = seed
        self._loss = config.loss.make()
        self._model: HfModel
        self._parameters: dict[str, torch.nn.Parameter]
        self._optimizer: torch.optim.AdamW
        self._scan: DeviceScan | None

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self._open(tensors)
        rng_state.seed_all(self._seed)

    def _open(self, weights: Mapping[str, HostTensor]) -> None:
        """Build the model with `weights` and a fresh optimizer."""
        self._model = HfModel(
            self._model_config, weights, self._config.device, self._config.activation_checkpointing
        )
        self._parameters = self._model.parameters()
        self._optimizer = self._fresh_optimizer()
        self._scan = DeviceScan() if _is_remote(self._model.device) else None

    def weights(self) -> dict[str, HostTensor]:
        return {name: self._to_host(name, tensor) for name, tensor in self._model.tensors().items()}

    def step(self, batch: Batch) -> dict[str, float]:
        check_rows(batch, self._model.vocab_size)
        advantages = batch_advantages(batch, self._config.normalize_advantages)
        lr = self._set_lr(batch.step)
        metrics = StepMetrics()
        for rows in minibatches(len(batch.rows), self._config.minibatches, self._seed, batch.step):
            self._minibatch(_examples(batch, advantages, rows, self._config), metrics)
        return metrics.by_name(batch) | {"trainer/lr": lr}

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        tensors = {
            f"model/{name}": to_host(tensor) for name, tensor in self._model.tensors().items()
        }
        updates: dict[str, int] = {}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter)
            if moments:
                updates[name] = int(moments["step"])
                tensors |= {
                    f"optimizer/{name}/{moment}": to_host(moments[moment]) for moment in MOMENTS
                }
        random_tensors, random_state = rng_state.capture()
        tensors |= {f"rng/{name}": tensor for name, tensor in random_tensors.items()}
        return tensors, {"format": STATE_FORMAT, "updates": updates, "rng": random_state}

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        if state.get("format") != STATE_FORMAT:
            raise CorruptError(
                f"the engine's state has format {state.get('format')!r}; this engine reads "
                f"{STATE_FORMAT}"
            )
        saved = build(SavedState, dump(state), "the engine's state")
        self._open(_below("model/", tensors))
        moments = _below("optimizer/", tensors)
        expected = {f"{name}/{moment}" for name in saved.updates for moment in MOMENTS}
        if expected != moments.keys() or not saved.updates.keys() <= self._parameters.keys():
            raise CorruptError(
                "the optimizer's state does not belong to this model: its parameters have other "
                "names"
            )
        template = self._optimizer.state_dict()
        for index, name in enumerate(self._names_in_optimizer_order()):
            if name in saved.updates:
                template["state"][index] = {"step": torch.tensor(float(saved.updates[name]))} | {
                    moment: _checked_moment(
                        f"{name}/{moment}", moments[f"{name}/{moment}"], self._parameters[name]
                    )
                    for moment in MOMENTS
                }
        self._optimizer.load_state_dict(template)
        rng_state.restore(_below("rng/", tensors), saved.rng)

    def _to_host(self, name: str, tensor: Tensor) -> HostTensor:
        dtype = self._config.publish_dtype if tensor.is_floating_point() else None
        return self._scan.to_host(name, tensor, dtype) if self._scan else to_host(tensor, dtype)

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        """Create AdamW with weight decay on matrices only, not on norms and biases."""
        parameters = self._parameters.values()
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self._config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        # fused: one pass over each parameter instead of a dozen small operations, on CPU and GPU.
        return torch.optim.AdamW(
            groups, lr=self._config.lr, betas=self._config.betas, eps=self._config.eps, fused=True
        )

    def _names_in_optimizer_order(self) -> list[str]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return [
            names[id(parameter)]
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        ]

    def _set_lr(self, step: int) -> float:
        """Set and return the learning rate of `step`: linear warm-up, without state to restore."""
        factor = min(1.0, step / self._config.warmup_steps) if self._config.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * factor
        return self._config.lr * factor

    def _minibatch(self, examples: list[PackedRow], metrics: StepMetrics) -> None:
        """Accumulate the gradient of the minibatch and take one optimizer step."""
        if not any(example.loss_mask.any() for example in examples):
            return
        lengths = [len(example.tokens) for example in examples]
        micro_batches = [
            [pack([examples[row] for row in rows]) for rows in blocks]
            for blocks in plan(lengths, self._config.micro_batch_tokens)
        ]
        self._optimizer.zero_grad(set_to_none=True)
        prepares_whole = len(micro_batches) > 1 and self._loss.whole_minibatch
        whole = self._prepare_whole(micro_batches) if prepares_whole else None
        start = 0
        for blocks in micro_batches:
            tokens = self._forward(blocks)
            end = start + len(tokens.logprobs_N)
            prepared = whole.part(start, end) if whole else self._prepare([tokens])
            arguments = prepared, tokens.logprobs_N, tokens.behaviour_N, tokens.advantages_N
            losses = check_token_loss(self._loss.token_losses(*arguments), end - start)
            loss = (losses.values_N * tokens.weight_N).sum()
            torch.autograd.backward(loss)
            metrics.add(
                loss,
                losses,
                tokens.logprobs_N,
                tokens.entropy_N,
                tokens.behaviour_N,
                tokens.advantages_N,
            )
            start = end
        self._update(metrics, prepared)

    def _update(self, metrics: StepMetrics, prepared: Prepared) -> None:
        """Clip the gradient and take an optimizer step, unless the gradient is not finite."""
        limit = math.inf if self._config.grad_clip is None else self._config.grad_clip
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit))
        if np.isfinite(norm) and self._config.lr:  # a step of length 0 would still make 0.0 of −0.0
            self._optimizer.step()
        metrics.add_update(norm, prepared.scalars)

    def _prepare_whole(self, micro_batches: list[list[Block]]) -> Prepared:
        """Prepare a minibatch of several micro-batches by a forward pass without gradients."""
        with torch.no_grad():
            return self._prepare([self._forward(blocks) for blocks in micro_batches])

    def _prepare(self, parts: list[_Tokens]) -> Prepared:
        return self._loss.prepare(
            torch.cat([part.logprobs_N.detach() for part in parts]),
            torch.cat([part.behaviour_N for part in parts]),
            torch.cat([part.advantages_N for part in parts]),
        )

    def _forward(self, blocks: list[Block]) -> _Tokens:
        logprobs, entropies = zip(*(self._block_logprobs(block) for block in blocks), strict=True)
        return _Tokens(
            logprobs_N=torch.cat(logprobs),
            entropy_N=torch.cat(entropies),
            behaviour_N=self._tensor(np.concatenate([block.behaviour_N for block in blocks])),
            advantages_N=self._tensor(np.concatenate([block.advantages_N for block in blocks])),
            weight_N=self._tensor(np.concatenate([block.weight_N for block in blocks])),
        )

    def _block_logprobs(self, block: Block) -> tuple[Tensor, Tensor]:
        hidden_BTH = self._model.hidden(self._tensor(block.tokens_BT))
        # The head is applied only to positions that predict a loss token, not to prompts.
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, self._tensor(block.source_N))
        return token_logprobs(
            hidden_NH,
            self._model.head,
            self._tensor(block.target_N),
            self._tensor(block.temperature_N),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


def _checked_moment(label: str, moment: HostTensor, parameter: Tensor) -> Tensor:
    """Return the moment as a tensor; CorruptError unless AdamW can continue from it."""
    expected = NAMES[parameter.dtype], tuple(parameter.shape)
    if (moment.dtype, moment.shape) != expected:
        raise CorruptError(
            f"optimizer/{label} is {moment.dtype} {list(moment.shape)}; its parameter is "
            f"{expected[0]} {list(expected[1])}"
        )
    tensor = to_torch(moment)
    if not tensor.isfinite().all():
        raise CorruptError(f"optimizer/{label} has an element that is not finite")
    if label.endswith(SECOND_MOMENT) and (tensor < 0).any():
        raise CorruptError(f"optimizer/{label} is a mean of squares and has a negative element")
    return tensor


def _is_remote(device: torch.device) -> bool:
    """Return whether a copy to the host crosses a bus; on a CPU, storage's comparison is faster."""
    return device.type != "cpu"


def _examples(
    batch: Batch, advantages: list[np.ndarray], rows: np.ndarray, config: TrainConfig
) -> list[PackedRow]:
    weights = config.loss.row_weights([int(batch.rows[row].loss_mask.sum()) for row in rows])
    return [
        PackedRow(
            tokens=batch.rows[row].tokens,
            loss_mask=batch.rows[row].loss_mask,
            behaviour=batch.rows[row].logprobs,
            advantages=advantages[row],
            temperature=batch.rows[row].temperature,
            weight=weight,
        )
        for row, weight in zip(rows, weights, strict=True)
    ]


def _below(prefix: str, tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
