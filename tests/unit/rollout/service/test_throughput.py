from rollout.service.throughput import Throughput
from storage.records.progress import RolloutProgress
from tests.support.runs import builders


def test_episodes_failures_tokens_and_orders_are_counted() -> None:
    tally = Throughput(lambda: 0.0)
    tally.episode(
        builders.episode(builders.sequence(answer=(1, 2, 3)), builders.sequence(answer=(4,)))
    )
    tally.episode(builders.episode(error="ValueError: no"))
    tally.order_done()
    assert tally.progress() == RolloutProgress(
        orders_done=1, episodes=2, episodes_failed=1, tokens=4
    )


def test_the_rate_covers_the_last_ten_seconds() -> None:
    now_s = 0.0
    tally = Throughput(lambda: now_s)
    assert tally.tokens_per_s() == 0.0
    now_s = 2.0
    tally.episode(builders.episode(builders.sequence(answer=(1,) * 30)))
    assert tally.tokens_per_s() == 15.0  # 30 tokens in the 2 s since the start
    now_s = 11.0
    tally.episode(builders.episode(builders.sequence(answer=(1,) * 10)))
    assert tally.tokens_per_s() == 4.0  # 40 tokens in 10 s
    now_s = 12.5
    assert tally.tokens_per_s() == 1.0
    now_s = 22.0
    assert tally.tokens_per_s() == 0.0
