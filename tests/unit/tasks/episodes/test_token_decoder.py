import base64
import gc
import itertools
import json
import logging
from typing import Any

import psutil
import pytest

from storage.machine.kept_process import KeptProcess
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from tasks.episodes import token_decoder_child
from tasks.episodes.token_decoder import DECODERS_MAX, TOKEN_TEXT_MAX, TokenDecoder, TokenDecoders
from tests.support.runs.fakes import base_files
from tests.support.runs.small_run import SmallRun


def run_with(name: str, **changes: Any) -> SmallRun:
    """A run whose tokenizer has these fields."""
    files = base_files()
    fields = json.loads(files["tokenizer.json"]) | changes
    small_run = SmallRun(f"decoder-{name}")
    small_run.version("solver", 0, {**files, "tokenizer.json": json.dumps(fields).encode()})
    return small_run


def child_of(decoder: TokenDecoder) -> int:
    assert decoder._process is not None
    pid = decoder._process.pid
    assert pid is not None
    return pid


def test_tokens_are_decoded_alone_and_together() -> None:
    decoder = TokenDecoder(run_with("plain").run, "solver")
    assert [decoder.token(token) for token in (22, 10, 22)] == ["7", "+", "7"]
    assert decoder.text([22, 10, 22]) == "7+7"
    assert decoder.text([]) == ""


def test_a_character_of_several_tokens_is_decoded_whole() -> None:
    decoder = TokenDecoder(run_with("bytes").run, "solver")
    tokens = _tokens("☺")
    assert len(tokens) > 1
    assert decoder.text(tokens) == "☺"
    assert "☺" not in "".join(map(decoder.token, tokens))


def _tokens(text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_str(base_files()["tokenizer.json"].decode()).encode(text).ids
    return ids


def test_a_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TokenDecoder(run_with("once").run, "solver")
    assert decoder.token(22) == "7"
    monkeypatch.setattr(decoder, "text", lambda tokens: "another")
    assert decoder.token(22) == "7"
    assert decoder.token(23) == "another"


def test_the_text_of_a_token_is_cut() -> None:
    longer = {"type": "Replace", "pattern": {"String": "7"}, "content": "x" * 300}
    decoder = TokenDecoder(run_with("long", decoder=longer).run, "solver")
    assert decoder.token(22) == "x" * TOKEN_TEXT_MAX
    assert decoder.text([22]) == "x" * 300


def test_special_tokens_are_shown() -> None:
    (special,) = _tokens("<|end|>")
    assert TokenDecoder(run_with("special").run, "solver").token(special) == "<|end|>"


@pytest.mark.parametrize("policy", ["", "verifier"])
def test_without_a_tokenizer_tokens_are_numbers(policy: str) -> None:
    decoder = TokenDecoder(run_with(f"none-{policy}").run, policy)
    assert decoder.token(22) == "⟨22⟩"
    assert decoder.text([22, 10]) == "⟨22⟩⟨10⟩"
    assert decoder._process is None


def test_tokens_at_which_the_tokenizer_panics_are_numbers_and_others_are_not() -> None:
    """Its decoder takes more characters from a token than that has."""
    strip = {"type": "Strip", "content": "7", "start": 1, "stop": 1}
    decoder = TokenDecoder(run_with("panic", decoder=strip).run, "solver")
    assert [decoder.token(token) for token in (22, 10)] == ["⟨22⟩", "+"]
    assert decoder.text([22, 10]) == "⟨22⟩⟨10⟩"


def test_a_tokenizer_that_cannot_be_loaded_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = TokenDecoder(run_with("unreadable", model=1).run, "solver")
    assert "tokens are shown as numbers: the tokenizer.json of solver cannot be used: " in (
        caplog.text
    )
    assert decoder.token(22) == "⟨22⟩"


def test_a_lost_process_is_replaced() -> None:
    decoder = TokenDecoder(run_with("lost").run, "solver")
    assert decoder.token(22) == "7"
    psutil.Process(child_of(decoder)).kill()
    assert [decoder.token(token) for token in (22, 10)] == ["7", "+"]


@pytest.mark.parametrize("error", [ProcessTimeoutError, ProcessDiedError, OSError])
def test_after_a_failure_tokens_are_numbers_and_known_ones_stay(
    error: type[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TokenDecoder(run_with(f"failed-{error.__name__}").run, "solver")
    assert decoder.token(22) == "7"
    child = child_of(decoder)

    def fail(process: KeptProcess, question: object = None) -> None:
        raise error("no more")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(KeptProcess, "ask", fail)
        assert [decoder.token(token) for token in (22, 10, 23)] == ["7", "⟨10⟩", "⟨23⟩"]
    assert caplog.text.count("tokens are shown as numbers") == 1
    assert not psutil.pid_exists(child)
    assert decoder.token(24) == "⟨24⟩"


def test_an_interruption_is_no_failure_of_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TokenDecoder(run_with("interrupted").run, "solver")

    def interrupted(process: KeptProcess, question: object = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(KeptProcess, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.token(22)
    assert decoder.token(22) == "7"


def test_all_texts_share_a_limit_of_cpu_time_that_grows_with_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    used_s = itertools.chain([2.0, 3.0, 4.0], itertools.repeat(1e6))
    monkeypatch.setattr(token_decoder_child, "limit_cpu", limits.append)
    monkeypatch.setattr(token_decoder_child.time, "process_time", lambda: next(used_s))
    child = token_decoder_child.DecoderChild()
    body = base64.b64encode(base_files()["tokenizer.json"]).decode()
    child.answer(tokenizer=body)
    assert child.answer(tokens=[22] * 5) == "7" * 5
    child.answer(tokens=[22] * 6)
    child.answer(tokens=[22])
    assert limits == [pytest.approx(each) for each in (28.0, 27.005, 26.011, 0.001)]


def test_the_process_ends_with_its_decoder() -> None:
    decoder = TokenDecoder(run_with("ends").run, "solver")
    child = child_of(decoder)
    assert decoder.token(22) == "7"
    del decoder
    gc.collect()
    assert not psutil.pid_exists(child)


def test_a_run_has_one_decoder_for_each_policy_and_a_limited_number() -> None:
    decoders = TokenDecoders(run_with("policies").run)
    assert decoders.of("solver") is decoders.of("solver")
    child = child_of(decoders.of("solver"))
    for number in range(DECODERS_MAX):
        decoders.of(f"none-{number}")
    gc.collect()
    assert not psutil.pid_exists(child)
    assert decoders.of("solver").token(22) == "7"
