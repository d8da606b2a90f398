import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator

import psutil
import pytest

from rollout.agents import chat_process
from rollout.agents.chat import user
from rollout.agents.chat_process import ChatProcess, check_tokenizer
from storage.errors import ConfigError, CorruptError
from storage.machine import kept_process
from storage.machine.limited_process import LimitedProcess
from tests.support.runs.fakes import END_ID, base_files, tiny_chat

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""A template works at it for longer than any test."""
GIGABYTES = "{% set text = messages[0].content * 900000000 %}"
FOR_A_SECOND_QUESTION = "{% if messages[0].content == 'again' %}WORK{% endif %}"
CONVERSATION = "{% for m in messages %}{{ m.content }}{% endfor %}"


def with_template(template: str) -> dict[str, bytes]:
    return {**base_files(), "chat_template.jinja": template.encode()}


def at_a_second_question(work: str) -> dict[str, bytes]:
    return with_template(FOR_A_SECOND_QUESTION.replace("WORK", work) + CONVERSATION)


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatProcess]:
    made = ChatProcess({**base_files(), "others.json": b"not JSON"})
    yield made
    made.close()


def child_of(chat: ChatProcess) -> LimitedProcess:
    child = chat._process._child
    assert child is not None
    return child


async def test_a_chat_in_a_process_converts_as_one_without_a_process(chat: ChatProcess) -> None:
    local = tiny_chat().local
    question = [user("7+8-3=?")]
    answered = [*question, {"role": "assistant", "content": "\\boxed{12}"}]
    opening = await chat.opening(question)
    assert opening == local.opening(question)
    assert await chat.continuation(answered, [user("?")], END_ID) == local.continuation(
        answered, [user("?")], END_ID
    )
    assert await chat.text(opening) == local.text(opening) == "7+8-3=?"
    assert chat.stop_ids == local.stop_ids


async def test_texts_of_several_samples_are_converted_one_after_another(chat: ChatProcess) -> None:
    texts = [str(number) * 2_000 for number in range(6)]
    openings = await asyncio.gather(*(chat.opening([user(text)]) for text in texts))
    assert openings == [tiny_chat().local.opening([user(text)]) for text in texts]


async def test_text_of_any_form_crosses_the_border_of_the_process(chat: ChatProcess) -> None:
    text = 'line\n"quoted" \u2028 ☺ \\'
    assert await chat.opening([user(text)]) == tiny_chat().local.opening([user(text)])


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, ConfigError, r"^the base model's files \(none\) make no tokenizer: tokenizer\.json"),
        (base_files() | {"config.json": b"[]"}, CorruptError, r"config\.json is a JSON list"),
    ],
)
def test_files_without_a_chat_are_refused_as_without_a_process(
    files: dict[str, bytes], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ChatProcess(files)


def test_a_full_disk_is_no_fault_of_the_base_model() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="No usable temporary directory"):
            ChatProcess(base_files())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_messages_that_a_workflow_made_wrong_are_an_error_and_the_process_stays(
    chat: ChatProcess,
) -> None:
    child = child_of(chat).pid
    with pytest.raises(ConfigError, match="TypeError: unhashable type"):
        await chat.opening([{"role": "user", "content": ["a"]}])  # type: ignore[dict-item]  # wrong
    with pytest.raises(ConfigError, match="the chat template refuses a conversation of judge"):
        await chat.opening([{"role": "judge", "content": "?"}])
    assert child_of(chat).pid == child


def test_files_that_take_long_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"\(chat_template\.jinja, config\.json, .*\) make no tokenizer within 2 s of CPU time "
        r"and 2,048 MiB: its process failed \(it used up its CPU time\); correct",
    ):
        ChatProcess(with_template(ENDLESS), load_cpu_s=2.0)


async def test_a_text_that_takes_long_is_an_error_and_the_next_one_is_converted() -> None:
    chat = ChatProcess(at_a_second_question(ENDLESS), text_cpu_s=2.0)
    try:
        first = child_of(chat).pid
        with pytest.raises(
            ConfigError,
            match=r"takes more than 2 s of CPU time for messages of 9 characters; correct",
        ):
            await chat.opening([user("again")])
        assert await chat.opening([user("7")]) == [22]
        assert child_of(chat).pid != first
    finally:
        chat.close()


async def test_a_text_that_takes_gigabytes_is_an_error_and_the_next_one_is_converted() -> None:
    chat = ChatProcess(at_a_second_question(GIGABYTES))
    try:
        with pytest.raises(ConfigError, match="MemoryError"):
            await chat.opening([user("again")])
        assert await chat.opening([user("7")]) == [22]
        peak = psutil.Process(child_of(chat).pid).memory_info().vms
        assert peak < 3 << 30
    finally:
        chat.close()


async def test_a_lost_process_is_replaced_while_it_is_idle() -> None:
    chat = ChatProcess(base_files())
    try:
        lost = child_of(chat)
        os.kill(lost.pid, signal.SIGKILL)
        while not lost.has_ended:  # noqa: ASYNC110 -- the kernel ends it
            await asyncio.sleep(0.01)
        assert await chat.text([22]) == "7"
        assert child_of(chat).pid != lost.pid
    finally:
        chat.close()


async def test_a_question_over_which_a_process_is_lost_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Dying(LimitedProcess):
        def ask(self, question: dict[str, object]) -> dict[str, object]:
            if question.get("call") == "text":
                asked.append(self.pid)
                if len(asked) != 2:
                    self.kill()
            return super().ask(question)

    monkeypatch.setattr(kept_process, "LimitedProcess", Dying)
    chat = ChatProcess(base_files())
    try:
        assert await chat.text([22]) == "7"
        assert len(set(asked)) == 2
        with pytest.raises(
            ConfigError,
            match=r"takes more than 2,048 MiB for an answer of 1 tokens, or its process is lost; c",
        ):
            await chat.text([22])
        assert len(set(asked)) == 3  # the child that answered, and one more
    finally:
        chat.close()


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_process_that_is_lost_while_it_loads_is_replaced_once(
    num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Dying(LimitedProcess):
        def ask(self, question: dict[str, object]) -> dict[str, object]:
            started.append(self.pid)
            if len(started) <= num_lost:
                self.kill()
            return super().ask(question)

    monkeypatch.setattr(kept_process, "LimitedProcess", Dying)
    if num_lost == 1:
        ChatProcess(base_files()).close()
    else:
        with pytest.raises(ConfigError, match="its process failed"):
            ChatProcess(base_files())
    assert len(started) == 2


def test_a_tokenizer_without_a_template_is_checked() -> None:
    files = base_files()
    del files["chat_template.jinja"]
    check_tokenizer(files)
    with pytest.raises(ConfigError, match="make no tokenizer"):
        check_tokenizer(files | {"tokenizer.json": b"{}"})


async def test_very_many_tokens_are_an_error_in_the_process() -> None:
    chat = ChatProcess(at_a_second_question("{{ messages[0].content * 500000 }}"))
    try:
        with pytest.raises(ConfigError, match=r"messages of 9 characters became 2,500,005 tokens"):
            await chat.opening([user("again")])
        assert await chat.text([22]) == "7"
    finally:
        chat.close()


async def test_closing_ends_the_process_and_a_conversion_in_progress() -> None:
    chat = ChatProcess(at_a_second_question(ENDLESS), text_cpu_s=1e6)
    child = child_of(chat).pid
    running, queued = (asyncio.create_task(chat.opening([user("again")])) for _ in range(2))
    used_s = psutil.Process(child).cpu_times().user
    while psutil.Process(child).cpu_times().user < used_s + 0.2:  # noqa: ASYNC110 -- it is at work
        await asyncio.sleep(0.01)
    await asyncio.to_thread(chat.close)
    results = await asyncio.gather(running, queued, return_exceptions=True)
    assert [type(result) for result in results] == [ConfigError, asyncio.CancelledError]
    assert "the tokenizer was closed before the text was converted" in str(results[0])
    assert not psutil.pid_exists(child)
    with pytest.raises(ConfigError, match="the tokenizer was closed before"):
        await chat.text([22])


def test_the_process_has_no_torch_and_none_of_the_services_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    chat = ChatProcess(base_files())
    try:
        child = psutil.Process(child_of(chat).pid)
        assert "secret" not in child.environ().values()
        assert not any("libtorch" in part.path for part in child.memory_maps())
    finally:
        chat.close()


def test_only_the_files_of_a_chat_are_sent_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Recorded(LimitedProcess):
        def ask(self, question: dict[str, object]) -> dict[str, object]:
            sent.extend(json.loads(json.dumps(question)).get("files", ()))
            return super().ask(question)

    monkeypatch.setattr(kept_process, "LimitedProcess", Recorded)
    ChatProcess({**base_files(), "vocab.json": b"{}", "README.md": b""}).close()
    assert sent == sorted(base_files())


async def test_a_tokenizer_that_takes_long_often_is_not_asked_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_process, "FAILURES_MAX", 1)
    monkeypatch.setattr(chat_process, "TEXTS_PER_FAILURE", 3)
    chat = ChatProcess(at_a_second_question(ENDLESS), text_cpu_s=1.0)
    try:
        for _ in range(2):
            assert await chat.text([22]) == "7"
        with pytest.raises(ConfigError, match="takes more than 1 s of CPU time"):
            await chat.opening([user("again")])
        assert await chat.text([22]) == "7"  # one failure more is allowed for three conversions
        with pytest.raises(ConfigError, match="takes more than 1 s of CPU time"):
            await chat.opening([user("again")])
        with pytest.raises(
            ConfigError, match=r"is not asked for an answer of 1 tokens: 2 of 5 conversions took"
        ):
            await chat.text([22])
        assert chat._process.pid is None
    finally:
        chat.close()


async def test_long_messages_have_more_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[object] = []

    class Recorded(LimitedProcess):
        def ask(self, question: dict[str, object]) -> dict[str, object]:
            limits.append(question["cpu_s"])
            return super().ask(question)

    monkeypatch.setattr(kept_process, "LimitedProcess", Recorded)
    chat = ChatProcess(base_files())
    try:
        await chat.opening([user("7" * 1_000)])
        await chat.text([22] * 2_000)
        before = [user("7" * 1_000), {"role": "assistant", "content": "7" * 2_000}]
        await chat.continuation(before, [user("7" * 3_000)], END_ID)
    finally:
        chat.close()
    check_tokenizer(base_files())
    assert limits.pop() == chat_process.CHECK_CPU_S
    assert limits == [
        chat_process.LOAD_CPU_S,
        *(
            pytest.approx(chat_process.TEXT_CPU_S + chat_process.PART_CPU_S * num_parts)
            for num_parts in (1_004, 2_000, 6_017)
        ),
    ]
