import pytest

from tasks.sizes import spelled


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (245_832, "245.8 kB"),
        (12_345_678, "12.3 MB"),
        (28e9, "28.0 GB"),
        (3e12, "3.0 TB"),
    ],
)
def test_byte_counts_are_short(num_bytes: float, words: str) -> None:
    assert spelled(num_bytes) == words
