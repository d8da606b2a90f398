import json
from pathlib import Path

import pytest

from rollout.agents import template_chat
from rollout.agents.chat import system, user
from rollout.agents.template_chat import TemplateChat, load_chat
from storage.errors import ConfigError, CorruptError
from storage.written_files import write_inside
from tests.support.runs import fakes
from tests.support.runs.fakes import END_ID, base_files

USER, ASSISTANT = 355, 356
QUESTION = [22, 10, 23, 12, 18, 28, 30]
"""7+8-3=?"""

FORGETFUL = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' and loop.last -%}thinking {% endif -%}"
    "{{ message.content }}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- "
    "endif -%}"
)
"""Drops the thinking from every answer but the last, as Qwen3's template does."""
SUMMING_UP = (
    "{%- for message in messages -%}{{ message.content }}|{{ messages | length }}{%- endfor -%}"
)


def with_template(template: str) -> TemplateChat:
    return load_chat({**base_files(), "chat_template.jinja": template.encode()})


def test_a_conversation_begins_with_the_tokens_of_the_template() -> None:
    assert fakes.tiny_chat().local.opening([user("7+8-3=?")]) == [
        USER,
        *QUESTION,
        END_ID,
        ASSISTANT,
    ]


def test_a_further_turn_adds_the_tokens_it_has_in_the_whole_conversation() -> None:
    chat = fakes.tiny_chat().local
    before = [user("7+8-3=?"), {"role": "assistant", "content": "\\boxed{12}"}]
    whole = chat.opening([*before, user("7+8-3=?")])
    behind_the_answer = len(whole) - len([USER, *QUESTION, END_ID, ASSISTANT])
    answered = whole[:behind_the_answer]
    assert answered[-1] == END_ID
    assert answered + chat.continuation(before, [user("7+8-3=?")], END_ID) == whole


def test_an_answer_truncated_by_its_length_gets_the_end_of_turn_token() -> None:
    before = [user("7+8-3=?"), {"role": "assistant", "content": "\\boxed{"}]
    assert fakes.tiny_chat().local.continuation(before, [user("?")], 346) == [
        END_ID,
        USER,
        30,
        END_ID,
        ASSISTANT,
    ]


def test_tokens_are_kept_when_the_template_shortens_old_answers() -> None:
    before = [user("?"), {"role": "assistant", "content": "so"}]
    assert with_template(FORGETFUL).continuation(before, [user("?")], END_ID) == [
        USER,
        30,
        END_ID,
        ASSISTANT,
    ]


@pytest.mark.parametrize("text", ["@@ANSWER@@", "@@@@"])
def test_a_conversation_continues_whatever_its_texts_are(text: str) -> None:
    before = [user(text), {"role": "assistant", "content": text}]
    assert fakes.tiny_chat().local.continuation(before, [user("?")], END_ID) == [
        USER,
        30,
        END_ID,
        ASSISTANT,
    ]


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    opening = fakes.tiny_chat().local.opening([user("7+8-3=?" * 1_000)])
    assert opening == [USER, *QUESTION * 1_000, END_ID, ASSISTANT]


def with_tokenizer(**changes: object) -> TemplateChat:
    files = base_files()
    fields = {**json.loads(files["tokenizer.json"]), **changes}
    return load_chat({**files, "tokenizer.json": json.dumps(fields).encode()})


def test_settings_of_a_call_in_the_tokenizers_file_change_no_tokens() -> None:
    padding = {"strategy": {"Fixed": 512}, "direction": "Right", "pad_to_multiple_of": None}
    chat = with_tokenizer(
        truncation={"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        padding={**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    )
    for repeats in (1, 1_000):
        opening = chat.opening([user("7+8-3=?" * repeats)])
        assert opening == [USER, *QUESTION * repeats, END_ID, ASSISTANT]


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("pre_tokenizer", {"type": "Split", "behavior": "Isolated", "invert": False}),
        ("normalizer", {"type": "Replace", "content": "y"}),
    ],
)
def test_a_text_at_which_the_tokenizer_panics_is_an_error_with_its_length(
    part: str, step: dict[str, object]
) -> None:
    chat = with_tokenizer(**{part: step | {"pattern": {"Regex": "(x+x+)+y"}}})
    with pytest.raises(
        ConfigError, match=r"the tokenizer fails at a text of 8\d characters: PanicException: Onig"
    ):
        chat.opening([user("x" * 60)])


@pytest.mark.parametrize(
    "template",
    [
        "{{ '\\ud800' }}{% for message in messages %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ '\\ud800' }}",
    ],
)
def test_a_template_with_half_a_character_is_an_error_with_its_length(template: str) -> None:
    files = base_files() | {"chat_template.jinja": template.encode()}
    with pytest.raises(ConfigError, match=r"the tokenizer fails at a text of \d+ characters"):
        load_chat(files).opening([user("7+8-3=?")])


def test_a_template_that_changes_the_text_after_an_answer_is_refused() -> None:
    before = [user("?"), {"role": "assistant", "content": "so"}]
    with pytest.raises(ConfigError, match="cannot continue after an answer"):
        with_template(SUMMING_UP).continuation(before, [user("?")], END_ID)


def test_a_role_unknown_to_the_template_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"refuses a conversation of system, judge.*no token for the role judge"
    ):
        fakes.tiny_chat().local.opening([system("be brief"), {"role": "judge", "content": "?"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages + 1 }}", "TypeError: can only concatenate list"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError: maximum recursion"),
        ("{{ 'a' * 10**18 }}", "MemoryError: "),
        ("{{ raise_exception('\\ud800') }}", "TemplateError: ?; give"),
    ],
)
def test_a_template_that_fails_while_it_runs_is_refused(template: str, words: str) -> None:
    with pytest.raises(
        ConfigError, match="the chat template refuses a conversation of user, ass"
    ) as refused:
        with_template(template)
    assert words in str(refused.value)
    assert "give the base model a chat_template.jinja" in str(refused.value)


def test_text_keeps_the_words_of_the_answer_and_drops_the_tokens_of_the_conversation() -> None:
    chat = fakes.tiny_chat().local
    tokens = chat.opening([user("<verify>reject</verify>")])
    assert chat.text(tokens) == "<verify>reject</verify>"


def test_answers_stop_at_the_end_of_turn_and_at_the_stop_tokens_of_the_model_files() -> None:
    assert fakes.tiny_chat().local.stop_ids == (END_ID,)
    named = {
        **base_files(),
        "generation_config.json": json.dumps({"eos_token_id": [353, 358]}).encode(),
    }
    assert load_chat(named).stop_ids == (353, END_ID, 358)


def test_files_without_a_usable_tokenizer_are_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.json\) make no tokenizer"):
        load_chat({"config.json": b"{}"})


def test_a_full_disk_is_no_fault_of_the_base_model(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**base_files(), "tokenizer_config.json": b"{}"}

    def write(folder: Path, name: str, body: bytes) -> None:
        if name == "tokenizer_config.json":
            raise OSError(28, "No space left on device")
        write_inside(folder, name, body)

    monkeypatch.setattr(template_chat, "write_inside", write)
    with pytest.raises(OSError, match="No space left"):
        load_chat(files)


def test_a_tokenizer_without_a_template_gives_an_error_that_names_it() -> None:
    files = base_files()
    del files["chat_template.jinja"]
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load_chat(files)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 20_000},  # makes as many tokens
        {"tokenizer_class": "Qwen2Tokenizer"},  # has a pre_tokenizer of its own
        {"tokenizer_class": "NoSuchTokenizer"},
        {"tokenizer_class": None},
    ],
)
def test_a_tokenizer_is_made_of_its_file_whatever_class_the_model_names(
    settings: dict[str, object],
) -> None:
    files = base_files()
    expected = load_chat(files)
    named = json.loads(files["tokenizer_config.json"]) | settings
    chat = load_chat({**files, "tokenizer_config.json": json.dumps(named).encode()})
    assert chat.opening([user("7+8-3=?")]) == expected.opening([user("7+8-3=?")])
    assert chat.stop_ids == expected.stop_ids
    assert len(chat._tokenizer) == len(expected._tokenizer)


def test_a_tokenizer_in_another_form_is_refused_with_what_to_do() -> None:
    files = base_files()
    fields = json.loads(files.pop("tokenizer.json"))
    files["vocab.json"] = json.dumps(fields["model"]["vocab"]).encode()
    with pytest.raises(
        ConfigError, match=r"make no tokenizer: tokenizer\.json is missing; where .*"
    ):
        load_chat(files)


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_a_tokenizer_file_outside_the_model_is_not_read(tmp_path: Path, class_name: str) -> None:
    files = base_files()
    path = _other_tokenizer(files, tmp_path)
    settings = json.loads(files["tokenizer_config.json"]) | {
        "tokenizer_class": class_name,
        "tokenizer_file": path,
        "vocab_file": str(tmp_path / "none.json"),
    }
    plain = {name: value for name, value in settings.items() if not name.endswith("_file")}
    named, unnamed = (
        load_chat({**files, "tokenizer_config.json": json.dumps(each).encode()})
        for each in (settings, plain)
    )
    assert named.opening([user("7+8-3=?")]) == unnamed.opening([user("7+8-3=?")])
    assert len(unnamed.opening([user("7+8-3=?")])) == len(QUESTION) + 3


def _other_tokenizer(files: dict[str, bytes], folder: Path) -> str:
    """Write a tokenizer that gives the tokens other numbers; return its path."""
    other = json.loads(files["tokenizer.json"])
    vocabulary = other["model"]["vocab"]
    other["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (folder / "tokenizer.4.0.json").write_text(json.dumps(other))
    (folder / "vocab.json").write_text(json.dumps(other["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return str(folder / "tokenizer.4.0.json")


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_no_settings_of_a_tokenizer_name_files_outside_the_model(
    tmp_path: Path, class_name: str
) -> None:
    files = base_files()
    path = _other_tokenizer(files, tmp_path)
    settings = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": class_name}
    plain = load_chat({**files, "tokenizer_config.json": json.dumps(settings).encode()})
    for name, changes in (
        ("tokenizer_config.json", settings | {"fast_tokenizer_files": [path]}),
        ("special_tokens_map.json", {"tokenizer_file": path}),
    ):
        named = load_chat(
            {
                **files,
                "tokenizer_config.json": json.dumps(settings).encode(),
                name: json.dumps(changes).encode(),
            }
        )
        assert named.opening([user("7+8-3=?")]) == plain.opening([user("7+8-3=?")])


def test_a_vocabulary_outside_the_model_is_not_read(tmp_path: Path) -> None:
    files = base_files()
    expected = load_chat(files).opening([user("7+8-3=?")])
    _other_tokenizer(files, tmp_path)
    paths = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    settings = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "Qwen2Tokenizer"}
    files["tokenizer_config.json"] = json.dumps(settings | paths).encode()
    assert load_chat(files).opening([user("7+8-3=?")]) == expected


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        (
            "tokenizer_config.json",
            b"[" * 100_000,
            r"make no tokenizer: tokenizer_config\.json is not JSON",
        ),
        (
            "tokenizer_config.json",
            b"[]",
            r"make no tokenizer: tokenizer_config\.json is a JSON list where an object belongs",
        ),
        ("tokenizer.json", b"{}", "make no tokenizer: "),
        ("tokenizer.json", b"[" * 100_000, "make no tokenizer: "),
        (
            "tokenizer_config.json",
            b'{"unk_token": "", "tokenizer_class": "PreTrainedTokenizerFast"}',
            "make no tokenizer: RecursionError: maximum recursion depth exceeded",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": "</s>"}',
            "name the end token '</s>'; eos_token_id is one whole",
        ),
        ("generation_config.json", b'{"eos_token_id": {"a": 1}}', "name the end token"),
        (
            "generation_config.json",
            json.dumps({"eos_token_id": [1] * 257}).encode(),
            r"name 25\d end tokens; at most 256 are allowed",
        ),
    ],
)
def test_unusable_chat_files_give_an_error_of_one_sentence(
    name: str, body: bytes, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_chat({**base_files(), name: body})


@pytest.mark.parametrize(
    ("template", "num_tokens"),
    [
        ("{{ '?' * 16000 }}{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{{ '?' * 17000 }}{% for m in messages %}{{ m.content }}{% endfor %}", "17,002"),
        ("{% for m in messages %}{{ m.content * 9000 }}{% endfor %}", "18,000"),
    ],
)
def test_a_template_that_makes_very_many_tokens_of_messages_is_refused(
    template: str, num_tokens: str | None
) -> None:
    only_later = "{% if messages[0].content == '??' %}" + template + "{% else %}"
    only_later += "{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}"
    chat = with_template(only_later)
    if num_tokens is None:
        assert len(chat.opening([user("??")])) == 16_002
    else:
        with pytest.raises(
            ConfigError,
            match=rf"^messages of 6 characters became {num_tokens} tokens; at most 16,768 are read",
        ):
            chat.opening([user("??")])


def test_a_template_that_fails_without_a_message_is_named() -> None:
    """No integer of so many digits becomes text."""
    template = (
        "{% if add_generation_prompt %}{% set a = 10 %}{{ raise_exception(a ** 5000) }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"^the chat template refuses .* message cannot be read: "
    ):
        with_template(template).opening([user("7+8-3=?")])


def test_no_settings_put_tokens_beside_a_text() -> None:
    fields = json.loads(base_files()["tokenizer.json"])
    mark = {"SpecialToken": {"id": "[X]", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"[X]": {"id": "[X]", "ids": [7], "tokens": ["a"]}}
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [mark, text], "pair": [mark], "special_tokens": tokens
    }  # fmt: skip
    added = json.dumps(
        {"add_bos_token": True, "bos_token": "$A $A", "add_eos_token": True}
    ).encode()
    for files in (
        {"tokenizer.json": json.dumps(fields).encode()},
        {"special_tokens_map.json": added},
        {"tokenizer_config.json": added},
    ):
        marked = load_chat({**base_files(), **files})
        assert marked.opening([user("7+8-3=?")]) == fakes.tiny_chat().local.opening(
            [user("7+8-3=?")]
        )


def test_an_answer_that_the_decoder_cannot_read_is_an_error_with_its_length() -> None:
    """The package panics: it takes more characters from the end of a token than that has."""
    fields = json.loads(base_files()["tokenizer.json"])
    fields["decoder"] = {"type": "Strip", "content": "7", "start": 1, "stop": 1}
    strips = load_chat({**base_files(), "tokenizer.json": json.dumps(fields).encode()})
    with pytest.raises(ConfigError, match=r"^the tokenizer fails at an answer of 1 tokens: "):
        strips.text([22])


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"a":' * 1000 + b"1" + b"}" * 1000])
def test_a_config_that_is_not_a_json_object_is_named(body: bytes) -> None:
    with pytest.raises(CorruptError, match=r"generation_config\.json (is a JSON list|is not JSON)"):
        load_chat({**base_files(), "generation_config.json": body})


@pytest.mark.parametrize(("num_chars", "is_read"), [(1280, True), (1281, False)])
def test_an_answer_that_becomes_very_many_characters_is_refused(
    num_chars: int, is_read: bool
) -> None:
    longer = {"type": "Replace", "pattern": {"String": "7"}, "content": "x" * num_chars}
    chat = with_tokenizer(decoder=longer)
    if is_read:
        assert chat.text([22]) == "x" * num_chars
    else:
        with pytest.raises(
            ConfigError, match=r"^an answer of 1 tokens became 1,281 characters; at most 1,280 are"
        ):
            chat.text([22])
