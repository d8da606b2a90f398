"""Problems of chained addition: their content, and disjoint splits."""

import pytest

from data_ops.prompts.chained_addition import problem, split_of, steps
from storage.errors import ConfigError


def test_steps_carry_the_running_value():
    assert steps("7+8-3=?") == [(7, "+", 8, 15), (15, "-", 3, 12)]
    assert steps("9-9+1-1+5=?") == [(9, "-", 9, 0), (0, "+", 1, 1), (1, "-", 1, 0), (0, "+", 5, 5)]


@pytest.mark.parametrize("text", ["", "7=?", "7+=?", "12+3=?", "7*8=?", "7+0=?", "7+8=15"])
def test_text_other_than_chained_addition_is_refused(text: str):
    with pytest.raises(ValueError, match="not a chained addition"):
        steps(text)


def test_a_problem_is_the_same_in_every_release():
    """Held-out sets and orders name problems by number: another generator would change every stored
    run without an error.
    """
    created = [
        (problem(i, "train", 0).fields["question"], problem(i, "test", 3).fields["question"])
        for i in range(3)
    ]
    assert created == [
        ("1+1-2+4+8=?", "4+1-3+5=?"),
        ("5-3+9-1=?", "9+1-9+2+4=?"),
        ("8-4+4+7+5=?", "4+5+8=?"),
    ]


def test_index_split_and_seed_determine_the_problem():
    prompt = problem(17, "test", 5)
    assert prompt.id == "chained_addition/test/5/17"
    assert prompt == problem(17, "test", 5)
    others = [problem(18, "test", 5), problem(17, "train", 5), problem(17, "test", 6)]
    assert all(other.fields != prompt.fields for other in others)


def test_answers_follow_from_the_questions_and_stay_in_range():
    lengths = set()
    for index in range(2000):
        fields = problem(index, "train", 1).fields
        chain = steps(fields["question"])
        lengths.add(len(chain) + 1)
        assert fields["answer"] == str(chain[-1][3])
        assert all(0 <= value <= 99 for *_, value in chain)
    assert lengths == {3, 4, 5}


def test_train_and_test_share_no_expression():
    train = {
        problem(index, "train", seed).fields["question"] for seed in (0, 1) for index in range(2000)
    }
    test = {
        problem(index, "test", seed).fields["question"] for seed in (0, 1) for index in range(500)
    }
    assert not train & test
    assert {split_of(question.removesuffix("=?")) for question in train} == {"train"}


def test_an_unknown_split_gives_an_error_of_one_sentence():
    with pytest.raises(
        ConfigError, match=r"split 'dev' of .* does not exist; set prompts\.split to train"
    ):
        problem(0, "dev", 0)
