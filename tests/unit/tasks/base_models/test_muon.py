"""Muon: orthogonalization by hand, and one step worked out."""

import pytest
import torch

from tasks.base_models.muon import Muon, orthogonalized


def quintic(x: float) -> float:
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


def test_singular_values_follow_the_quintic_and_directions_are_kept():
    # diag(3, 4) / ‖·‖ = diag(0.6, 0.8): a diagonal matrix stays diagonal.
    result = orthogonalized(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]))
    expected = torch.tensor([[[quintic(0.6), 0.0], [0.0, quintic(0.8)]]])
    torch.testing.assert_close(result, expected)


def test_a_stack_of_matrices_gives_the_results_of_single_ones():
    torch.manual_seed(0)
    many = torch.randn(3, 4, 7)
    torch.testing.assert_close(
        orthogonalized(many), torch.cat([orthogonalized(item[None]) for item in many])
    )


def test_a_zero_gradient_changes_nothing():
    assert torch.equal(orthogonalized(torch.zeros(1, 2, 3)), torch.zeros(1, 2, 3))


def test_tall_matrices_are_refused():
    with pytest.raises(ValueError, match="R <= C"):
        orthogonalized(torch.zeros(1, 3, 2))


def test_a_first_step_is_decay_and_the_scaled_orthogonalized_gradient():
    matrix = torch.nn.Parameter(torch.eye(2))
    matrix.grad = torch.diag(torch.tensor([3.0, 4.0]))
    Muon([matrix], lr=0.1, momentum=0.95, weight_decay=0.5).step()
    # Any positive multiple of the gradient has the same direction; the weights are first multiplied by
    # 1 - 0.1 · 0.5 = 0.95.
    expected = torch.diag(torch.tensor([0.95 - 0.1 * quintic(0.6), 0.95 - 0.1 * quintic(0.8)]))
    torch.testing.assert_close(matrix.detach(), expected)


def test_the_update_of_a_tall_matrix_is_scaled_by_the_root_of_its_ratio():
    wide, tall = torch.nn.Parameter(torch.zeros(2, 8)), torch.nn.Parameter(torch.zeros(8, 2))
    torch.manual_seed(0)
    wide.grad = torch.randn(2, 8)
    tall.grad = wide.grad.T.clone()
    Muon([wide, tall], lr=0.1, momentum=0.95, weight_decay=0.0).step()
    torch.testing.assert_close(tall.detach(), 2 * wide.detach().T)


def test_results_agree_with_torchs_muon_up_to_its_bfloat16():
    torch.manual_seed(0)
    own = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (4, 8), (24, 8), (8, 24))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in own]
    start = [p.detach().clone() for p in own]
    ours = Muon(own, lr=0.02, momentum=0.95, weight_decay=0.01)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
    )
    for _ in range(3):
        for mine, other in zip(own, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours.step()
        reference.step()
    for mine, other, before in zip(own, theirs, start, strict=True):
        assert (mine - other).norm() < 0.03 * (mine - before).norm()


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9, weight_decay=0.0)
