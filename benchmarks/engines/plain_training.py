"""The baseline of train engines: an ordinary training loop of transformers and AdamW.

Rows in their order, cut into micro-batches of equally many rows, padded to the longest one of the
micro-batch, all logits in float32, PPO's clipped loss, one optimizer step. `precision: bf16` is
autocast, as in the engines.

Shape legend: B rows of a micro-batch, T padded tokens, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.records.batches import Batch, BatchRow
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig
from trainer.engines.torch.host_tensors import to_torch
from trainer.losses.ppo_clip import PpoClip


class PlainTraining:
    """A model, AdamW and nothing else; the methods of a train engine that a step needs."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self._config, self._model_config = config, model_config
        self._model: Any
        self._optimizer: torch.optim.Optimizer

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**self._model_config)
        with torch.device(self._config.device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # theirs
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(to_torch(tensors[name]))
        self._model.train()
        if self._config.activation_checkpointing:
            self._model.gradient_checkpointing_enable()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._config.lr)

    def step(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on the whole batch; return the mean loss of its tokens."""
        num_tokens = sum(int(row.loss_mask.sum()) for row in batch.rows)
        self._optimizer.zero_grad()
        total = 0.0
        for rows in self._micro_batches(batch.rows):
            loss = self._loss(rows) / num_tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return {"trainer/loss": total, "trainer/tokens": float(num_tokens)}

    def _micro_batches(self, rows: Sequence[BatchRow]) -> Iterator[Sequence[BatchRow]]:
        longest = max(len(row.tokens) for row in rows)
        size = max(1, self._config.micro_batch_tokens // longest)
        for first in range(0, len(rows), size):
            yield rows[first : first + size]

    def _loss(self, rows: Sequence[BatchRow]) -> Tensor:
        """Return the sum of the clipped loss over the loss tokens."""
        loss = self._config.loss
        assert isinstance(loss, PpoClip)
        device = torch.device(self._config.device)
        tokens_BT = self._padded([row.tokens for row in rows]).long()
        present_BT = self._padded([np.ones_like(row.tokens) for row in rows])
        with torch.autocast(device.type, torch.bfloat16, enabled=self._config.precision == "bf16"):
            logits_BTV = self._model(
                input_ids=tokens_BT, attention_mask=present_BT, use_cache=False
            ).logits
        logprobs_BTV = torch.log_softmax(logits_BTV[:, :-1].float(), dim=-1)
        logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[..., 0]
        behaviour_BT = self._padded([row.logprobs for row in rows])[:, 1:]
        advantages_BT = self._padded([row.advantages for row in rows])[:, 1:]
        ratio_BT = torch.exp(logprobs_BT - behaviour_BT)
        clipped_BT = ratio_BT.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        losses_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        return (losses_BT * self._padded([row.loss_mask for row in rows])[:, 1:]).sum()

    def _padded(self, arrays: Sequence[np.ndarray]) -> Tensor:
        padded = np.zeros((len(arrays), max(map(len, arrays))), dtype=arrays[0].dtype)
        for row, array in enumerate(arrays):
            padded[row, : len(array)] = array
        return torch.from_numpy(padded).to(self._config.device)
