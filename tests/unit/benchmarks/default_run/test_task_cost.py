import pytest

from benchmarks.default_run import task_cost
from benchmarks.default_run.task_cost import Spent


def test_the_fixed_cost_of_a_flow_cancels_out_of_the_task_cost() -> None:
    result = task_cost.cost(
        Spent(10, client_s=1.0, server_s=2.0), Spent(110, client_s=1.5, server_s=2.8)
    )
    assert result.client_ms == pytest.approx(5.0)
    assert result.server_ms == pytest.approx(8.0)
    assert result.total_ms == pytest.approx(13.0)
