import numpy as np
import pytest

from trainer.engines.step.minibatches import normalize


def test_values_get_mean_zero_and_deviation_one() -> None:
    # mean 2, standard deviation sqrt(((−2)² + 0 + 2²) / 3) = 1.6329932; 2 / (1.6329932 + 1e-5) =
    # 1.2247374
    normal = normalize(np.array([0, 2, 4], dtype=np.float32))
    assert normal.tolist() == pytest.approx([-1.2247374, 0.0, 1.2247374])
    assert normal.dtype == np.float32


def test_the_deviation_is_the_population_deviation() -> None:
    # Divisor N: 1 / (1 + 1e-5); divisor N − 1 would give 1 / (1.4142136 + 1e-5).
    normal = normalize(np.array([1, -1], dtype=np.float32))
    assert normal.tolist() == pytest.approx([0.99999, -0.99999])


def test_a_single_value_and_equal_values_become_zero() -> None:
    assert normalize(np.array([3.5], dtype=np.float32)).tolist() == [0.0]
    assert normalize(np.array([3.5, 3.5, 3.5], dtype=np.float32)).tolist() == [0.0, 0.0, 0.0]


def test_no_values_give_an_empty_result() -> None:
    assert normalize(np.array([], dtype=np.float32)).tolist() == []


def test_small_differences_on_a_large_mean_are_not_lost() -> None:
    # In float32, the squares of 16,777,216 and 16,777,218 are equal.
    normal = normalize(np.array([16_777_216, 16_777_218], dtype=np.float32))
    assert normal.tolist() == pytest.approx([-0.99999, 0.99999], abs=1e-6)


def test_another_rank_or_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float64 \[1\]"):
        normalize(np.array([1.0]))
    with pytest.raises(ValueError, match=r"float32 \[1, 1\]"):
        normalize(np.array([[1.0]], dtype=np.float32))
