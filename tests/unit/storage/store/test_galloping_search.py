from storage.store.galloping_search import first_absent


def count_requests(size: int, start: int = 0) -> tuple[int, int]:
    """(first absent number, requests made) in a series 0 … size − 1."""
    requested: list[int] = []

    def exists(number: int) -> bool:
        requested.append(number)
        return number < size

    return first_absent(exists, start), len(requested)


def test_the_end_is_found_from_every_start() -> None:
    for size in range(40):
        for start in range(size + 1):
            assert count_requests(size, start)[0] == size


def test_an_absent_start_is_returned() -> None:
    assert count_requests(3, start=7) == (7, 1)


def test_ten_thousand_numbers_cost_few_requests() -> None:
    result, requests = count_requests(10_000)
    assert result == 10_000
    assert requests <= 30
