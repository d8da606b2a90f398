"""A model computes no more than its weights explain, whatever its config.json says."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from storage.errors import ConfigError
from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights
from trainer.engines.torch.hf import model as model_module
from trainer.engines.torch.hf.building import build, untied
from trainer.engines.torch.hf.forward_size import check_forward_size
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.host_tensors import to_host

SIZES: Json = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 16, "head_dim": 8,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPARSE = SIZES | {
    "model_type": "minimax_m3_vl_text", "num_local_experts": 2, "num_experts_per_tok": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "dense"],
    "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 512, "index_topk_blocks": 2,
    "index_local_blocks": 1, "dense_intermediate_size": 16, "shared_intermediate_size": 16,
    "rotary_dim": 8,
}  # fmt: skip
"""Attention of whose numbers no tensor has a side: blocks of 512 tokens, one local block."""


def opened(config: Json, built: Json) -> HfModel:
    """Open the model of `config` with weights that fit `built`."""
    torch.manual_seed(0)
    weights = {name: to_host(each.detach()) for name, each in untied(build(built)).items()}
    return HfModel(config, weights, "cpu", False)


@pytest.mark.parametrize(
    "change",
    [{"index_block_size": 65536}, {"index_local_blocks": 100_000}, {"index_local_blocks": 2**22}],
)
def test_numbers_that_no_weight_has_do_not_multiply_tokens(change: Json) -> None:
    with pytest.raises(ConfigError, match=r"minimax_m3_vl_text\) lets a few tokens take"):
        opened(SPARSE | change, SPARSE)


@pytest.mark.parametrize(
    "config",
    [
        SPARSE,
        SIZES | {"model_type": "mixtral", "num_local_experts": 4},
        SIZES | {"model_type": "gemma2"},
        SIZES | {"model_type": "gpt_neox"},
        SIZES | {"model_type": "jamba"},
        SIZES | {"model_type": "olmo2"},
        SIZES | {"model_type": "diffllama"},
        SIZES | {"model_type": "hrm_text"},
        SIZES | {"model_type": "aria_text", "moe_num_experts": 128, "moe_topk": 8},
        SIZES
        | {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4}
        | {f"linear_num_{kind}_heads": 16 for kind in ("key", "value")}
        | {f"linear_{kind}_head_dim": 4 for kind in ("key", "value")},
    ],
    ids=lambda config: config["model_type"],
)
def test_models_of_other_types_are_within_the_limits(config: Json) -> None:
    model = build(config)
    check_forward_size(model, 300, 512)
    assert model.training


def test_plain_models_are_not_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[int, int | None]] = []
    monkeypatch.setattr(
        model_module, "check_forward_size", lambda _model, *limits: checked.append(limits)
    )
    HfModel(MODEL_CONFIG, base_weights(), "cpu", False)
    assert checked == []
    HfModel(MODEL_CONFIG | {"num_labels": 3}, base_weights(), "cpu", False)
    assert checked == [(24, 64)]


class Body(torch.nn.Module):
    """A model whose layers are replaced by `compute`; it records the lengths of its rows."""

    def __init__(self, compute: Callable[[Tensor], object], *shapes: tuple[int, ...]) -> None:
        """The weights are a matrix [8, 4], and one of each of `shapes`."""
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in ((8, 4), *shapes))
        self.base_model = self._run
        self.config = SimpleNamespace(model_type="small")
        self.lengths: list[int] = []
        self._compute = compute

    def _run(self, input_ids: Tensor, use_cache: bool) -> None:
        assert not use_cache
        assert not torch.is_grad_enabled()
        assert int(input_ids.max()) < 8
        self.lengths.append(input_ids.shape[1])
        self._compute(input_ids)


@pytest.mark.parametrize(
    ("positions", "lengths"), [(None, [16, 256]), (1000, [16, 256]), (100, [16, 100]), (5, [5])]
)
def test_rows_end_at_the_last_position(positions: int | None, lengths: list[int]) -> None:
    body = Body(len)
    check_forward_size(body, 8, positions)
    assert body.lengths == lengths


def refused(compute: Callable[[Tensor], object], *shapes: tuple[int, ...]) -> bool:
    try:
        check_forward_size(Body(compute, *shapes), 8, 16)
    except ConfigError:
        return True
    return False


def viewed(times: int) -> Callable[[Tensor], object]:
    """That many operations without elements of their own."""
    return lambda tokens: [tokens.detach() for _ in range(times)]


def test_one_operation_may_give_the_elements_of_the_largest_weight_for_each_token() -> None:
    # 16 tokens count as 64, the matrix has 32 elements and a longest side of 8
    assert not refused(lambda tokens: torch.zeros(64 * 32))
    assert refused(lambda tokens: torch.zeros(64 * 32 + 1))


def test_all_operations_together_may_give_some_elements_for_each_side() -> None:
    def copied(times: int) -> Callable[[Tensor], object]:
        row = torch.zeros(1, 1000)
        return lambda tokens: [row.clone() for _ in range(times)]

    limit = 64 * 32 * 8 + 32  # 64 tokens, 32 elements for each of 8 rows, and the matrix itself
    assert not refused(copied(limit // 1000))
    assert refused(copied(limit // 1000 + 1))


def test_operations_are_limited_however_little_they_give() -> None:
    limit = 64 * 2 - 2  # 64 tokens and one weight; the body itself asks for the largest token
    assert not refused(viewed(limit))
    assert refused(viewed(limit + 1))


@pytest.mark.parametrize(
    ("shape", "matrices"), [((5, 3, 2), 5), ((2, 5, 3, 2), 10), ((100, 1, 4), 0), ((7,), 0)]
)
def test_each_matrix_of_a_stack_explains_some_operations_of_a_row(
    shape: tuple[int, ...], matrices: int
) -> None:
    limit = 64 * 2 * 2 + 32 * matrices - 2
    assert not refused(viewed(limit), shape)
    assert refused(viewed(limit + 1), shape)


def test_a_loop_over_the_rows_of_a_table_is_not_explained_by_them() -> None:
    part = {
        "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 512,
        "head_dim": 8, "hidden_size_global": 32, "cross_attn_k": 2, "cross_attn_all_layers": False,
    }  # fmt: skip
    wide = part | {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    blt: Json = {
        "model_type": "blt", "vocab_size": 300, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "patch_in_forward": True, "patch_size": 4,
        "cross_attn_k": 2, "encoder_hash_byte_group_size": [2, 3],
        "encoder_hash_byte_group_vocab": 2000, "encoder_hash_byte_group_nb_functions": 1,
        "patcher_config": part, "encoder_config": part, "decoder_config": part,
        "global_config": wide | {"num_key_value_heads": 4},
    }  # fmt: skip
    loop = {"encoder_hash_byte_group_vocab": 1, "encoder_hash_byte_group_nb_functions": 2000}
    assert opened(blt, blt).vocab_size == 300
    with pytest.raises(ConfigError, match="operations, of which its weights explain"):
        opened(blt | loop, blt)


def test_an_operation_that_would_fill_the_memory_is_not_executed() -> None:
    assert refused(lambda tokens: torch.zeros(2**50))
    wide = torch.zeros(1, 1).expand(1, 2**40)
    assert refused(lambda tokens: tokens.float().T @ wide)
    assert refused(lambda tokens: torch.nn.functional.pad(tokens, (0, 2**50)))


def test_what_depends_on_values_is_counted_where_it_was_computed() -> None:
    repeats = torch.tensor([3000])
    assert refused(lambda tokens: torch.repeat_interleave(tokens[0, :1], repeats))
    assert not refused(lambda tokens: tokens.nonzero())
