"""Any text survives a round trip through the tiny tokenizer, such as the prompts of GSM8K."""

from hypothesis import example, given
from hypothesis import strategies as st

from tasks.base_models.tiny_tokenizer import ROLES, WORDS, tokenizer

pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(WORDS),
    st.integers().map(str),
)
texts = st.lists(pieces).map("".join).filter(lambda text: not any(role in text for role in ROLES))


@given(texts)
@example("Natalia sold 48/2 = <<48/2=24>>24 clips; she earned $1,234.50\u00a0…\r\n\t#### 72")
@example("007 and 1000000, \u0301 combining, \x00\x1b\x7f, 👩‍👩‍👧, \u202eright to left")
@example("<|use" + "r|\\boxed{approvereject}</verify><verify>")
def test_any_text_without_roles_survives_a_round_trip(text: str):
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=True) == text


@given(texts, texts)
def test_a_prompt_and_its_answer_have_the_same_tokens_apart_and_together(prompt: str, answer: str):
    """A role token is between the two, so demonstrations and generated contexts agree."""
    asked = f"<|user|>{prompt}<|end|><|assistant|>"
    apart = tokenizer().encode(asked).ids + tokenizer().encode(answer).ids
    assert tokenizer().encode(asked + answer).ids == apart
