import json

import pytest

from storage.errors import CorruptError
from storage.formats.model_config import check_sizes, data_files, longest_context

SHAPES = [(151_936, 2048), (2048,)]


def body(**fields: object) -> bytes:
    return json.dumps({"model_type": "qwen3", **fields}).encode()


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("hidden_size", {"hidden_size": 2**40}),
        ("head_dim", {"head_dim": 151_937}),
        ("n_embd", {"n_embd": 1e12}),
        ("num_experts", {"num_experts": 10**9}),
        ("byte_group_size", {"byte_group_size": [3, [151_937]]}),
        ("attention_types", {"attention_types": [[["global", "local"], 75_969]]}),
        ("attention_types", {"attention_types": [[["a"], 10**5], [["a"], -(10**9)], ["b", 10**5]]}),
        ("attention_types", {"attention_types": [[[], 10**12]]}),
        ("vocab_size", {"text_config": {"parts": [{"vocab_size": 10**30}]}}),
    ],
)
def test_a_size_above_every_tensor_dimension_is_refused_by_name(
    key: str, fields: dict[str, object]
) -> None:
    with pytest.raises(CorruptError, match=rf"^config: {key} is .* dimension is 151936;"):
        check_sizes(body(**fields), SHAPES, "config")


def test_sizes_of_the_tensors_and_other_numbers_are_accepted() -> None:
    check_sizes(
        body(
            vocab_size=151_936,
            num_hidden_layers=28,
            rope_theta=5_000_000,
            attention_types=[[["global", "local"], 75_968], "x", [1], [1, 2]],
            max_position_embeddings=10**7,
            head_dim=None,
            use_cache=True,
        ),
        SHAPES,
        "config",
    )


def test_sizes_up_to_the_floor_are_accepted_for_small_tensors() -> None:
    check_sizes(body(window_size=2**16), [(4,)], "config")
    with pytest.raises(CorruptError, match=r"window_size is 65537, .* dimension is 65536"):
        check_sizes(body(window_size=2**16 + 1), [(4,)], "config")


def test_a_size_above_2_to_the_20_is_refused_beside_any_tensors() -> None:
    shapes = [(0, 10**9), (10**9, 1)]
    check_sizes(body(vocab_size=10**9, num_experts=2**20), shapes, "config")
    with pytest.raises(CorruptError, match=r"^config: num_experts is 1000000000; at most 1,048,"):
        check_sizes(body(text_config={"num_experts": 10**9}), shapes, "config")


def test_integers_are_limited_together_whatever_their_keys() -> None:
    """A class may make a list of as many items as any of them."""
    shapes = [(10**6, 10**6)]
    free = {
        "vocab_size": 10**6, "max_position_embeddings": 10**8, "eos_token_id": [10**6],
        "model_max_length": 10**9, "sliding_window": 10**7, "max_seq_len": 10**7, "n_ctx": 10**6,
        "context_size": 10**6, "rope_theta": 10**9, "rope_local_base_freq": 10**9, "x": 1e30, "y": -9,
    }  # fmt: skip
    check_sizes(body(**free, first=2**21, part={"stages": [2**20, [2**20]]}), shapes, "config")
    for more in (
        {"last": 1},
        {"last": {"stages": [[1]]}},
        {"last": True},
        {"negative": -9, "last": 1},
    ):
        with pytest.raises(
            CorruptError, match=r"^config: all integers together, .* than 4,194,304"
        ):
            check_sizes(body(first=2**21, part=[2**21], **more), shapes, "config")


def test_a_configuration_has_few_parts_and_labels() -> None:
    """transformers makes a configuration of each part, with a name for each label."""
    shapes = [(10**6, 10**6)]
    check_sizes(body(num_labels=1024, parts=[{}] * 1023), shapes, "config")
    with pytest.raises(CorruptError, match=r"^config: num_labels is 1025; at most 1,024 is read"):
        check_sizes(body(encoder={"num_labels": 1025}), shapes, "config")
    with pytest.raises(CorruptError, match=r"^config has more than 1,024 objects$"):
        check_sizes(body(parts=[{}] * 1024), shapes, "config")


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "layers", "decoder_layers"])
def test_very_many_layers_are_refused_beside_any_tensors(key: str) -> None:
    """Some classes search a list of layers for each layer, again and again."""
    shapes = [(0, 10**9), (10**9, 1)]
    check_sizes(body(text_config={key: 1024}), shapes, "config")
    with pytest.raises(CorruptError, match=rf"^config: {key} is 1025; at most 1,024 is read"):
        check_sizes(body(text_config={key: 1025}), shapes, "config")


def test_a_list_of_very_many_items_is_refused() -> None:
    check_sizes(body(parts=[{"attn_layer_indices": [0] * 4096}]), SHAPES, "config")
    with pytest.raises(CorruptError, match=r"^config: a list has 4,097 items; at most 4,096 are"):
        check_sizes(body(parts=[{"attn_layer_indices": [0] * 4097}]), SHAPES, "config")


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("chunk_size", 512),  # memory grows with its square, also for a sequence of four tokens
        ("mamba_chunk_size", 512),
        ("H_cycles", 16),
        ("L_cycles", 16),
        ("partial_rotary_factor", 1),
        ("rotary_pct", 1),
    ],
)
def test_a_number_that_no_tensor_limits_has_a_limit_of_its_own(key: str, largest: int) -> None:
    check_sizes(body(**{key: largest}), SHAPES, "config")
    for number in (largest + 1, largest + 0.5, 10**30):
        with pytest.raises(CorruptError, match=rf"config: {key} is .*; at most {largest} is read"):
            check_sizes(body(text_config={"rope_parameters": {key: number}}), SHAPES, "config")


def test_a_config_with_an_integer_of_thousands_of_digits_is_refused() -> None:
    """Their products have more digits than Python makes text of."""
    with pytest.raises(
        CorruptError, match=r"^config has an integer of \d+ bits; at most 128 are read"
    ):
        check_sizes(body(attention_types=[[["a", "b"], 10**4299]]), SHAPES, "config")


def test_a_config_that_is_not_a_json_object_is_refused() -> None:
    with pytest.raises(CorruptError, match="config is not JSON"):
        check_sizes(b"{", SHAPES, "config")


CODE = (
    "auto_map", "custom_pipelines", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation", "attribute_map", "configuration_files",
)  # fmt: skip
FILES = ("vocab", "merges", "init_inputs", "spm_file", "added_tokens_files", "source_spm")


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("config.json", (*CODE, "transformers_weights", "task_specific_params")),
        ("Generation_Config.json", CODE),
        ("Tokenizer_config.json", (*CODE, *FILES)),
        ("special_tokens_map.JSON", (*CODE, *FILES)),
    ],
)
def test_the_settings_of_a_model_name_no_code_and_no_files_whatever_the_case_of_their_name(
    name: str, dropped: tuple[str, ...]
) -> None:
    for key in dropped:
        settings = {"size": 1, key: {"x": "y"}, "parts": [[{key: "y", "b": 2}]]}
        data = data_files({name: json.dumps(settings).encode()})
        assert json.loads(data[name]) == {"size": 1, "parts": [[{"b": 2}]]}, key


def test_settings_without_such_names_and_other_files_keep_their_bytes() -> None:
    files = {
        "config.json": b'{"vocab": 1,  "source_spm": 2}',
        "tokenizer_config.json": b'{"files": 1,  "spm": 2}',
        "tokenizer.json": b'{"auto_map": 1,  "vocab": 2}',
    }
    assert (
        data_files({**files, "ADAPTER_CONFIG.json": b"{}", "adapter_config.json": b"{}"}) == files
    )


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 2.5}}, 10240),
        ({"max_position_embeddings": 10**20}, 2**31),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": -5}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 8.0}, None),
        ({"max_position_embeddings": 8, "text_config": {}}, None),
        ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 16}}, 16),
    ],
)
def test_the_longest_context_is_known_where_the_configuration_has_positions(
    config: dict[str, object], longest: int | None
) -> None:
    assert longest_context(config) == longest
