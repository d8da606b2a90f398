import pytest

from tasks.sizes import spelled


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (245_832, "246 kB"),
        (12_345_678, "12.3 MB"),
        (28e9, "28.0 GB"),
    ],
)
def test_numbers_of_bytes_are_short(num_bytes: float, words: str) -> None:
    assert spelled(num_bytes) == words
