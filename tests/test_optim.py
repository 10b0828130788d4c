"""BatchAdam against torch.optim.Adam."""

from __future__ import annotations

import pytest
import torch

from tl_localize.optim import BatchAdam


def targets(n: int) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0))


def gradient(parameter: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (parameter - target).sin() * (1 + parameter.cos())


def torch_adam(target: torch.Tensor, steps: int, learning_rate: float) -> list[torch.Tensor]:
    parameter = torch.zeros_like(target).requires_grad_()
    adam = torch.optim.Adam([parameter], lr=learning_rate)
    trajectory = []
    for _ in range(steps):
        parameter.grad = gradient(parameter.detach(), target)
        adam.step()
        trajectory.append(parameter.detach().clone())
    return trajectory


@pytest.mark.parametrize("learning_rate", [1e-3, 0.05])
def test_batch_adam_follows_torch_step_by_step(learning_rate: float) -> None:
    target = targets(3)
    parameter = torch.zeros_like(target)
    adam = BatchAdam([parameter], learning_rate)
    for step, wanted in enumerate(torch_adam(target, 60, learning_rate)):
        adam.step([gradient(parameter, target)])
        torch.testing.assert_close(parameter, wanted, atol=1e-6, rtol=1e-6, msg=f"step {step}")


def test_batch_adam_keep_goes_on_as_if_alone() -> None:
    target = targets(4)
    adam = BatchAdam([torch.zeros_like(target).requires_grad_()], 0.05)
    for _ in range(7):
        adam.step([gradient(adam.parameters[0].detach(), target)])
    keep = torch.tensor([3, 1])
    adam.keep(keep)
    for _ in range(9):
        adam.step([gradient(adam.parameters[0].detach(), target[keep])])
    torch.testing.assert_close(adam.parameters[0].detach(), torch_adam(target, 16, 0.05)[-1][keep], atol=1e-6, rtol=1e-6)


def test_batch_adam_trains_what_is_added_as_if_alone() -> None:
    """Problems enter after 0, 7 and 12 steps, and each is where torch's Adam is after as many steps of its own."""
    target = targets(3)
    adam = BatchAdam([torch.zeros(0, 5).requires_grad_()], 0.05)
    for step in range(20):
        if step in (0, 7, 12):
            adam.add([torch.zeros(1, 5)])
        adam.step([gradient(adam.parameters[0].detach(), target[: len(adam.n_steps)])])
    assert adam.n_steps.tolist() == [20, 13, 8]
    wanted = torch.stack([torch_adam(target, n, 0.05)[-1][i] for i, n in enumerate((20, 13, 8))])
    torch.testing.assert_close(adam.parameters[0].detach(), wanted, atol=1e-6, rtol=1e-6)


def test_batch_adam_parameters_stay_leaves_that_want_a_gradient() -> None:
    adam = BatchAdam([torch.zeros(3, 2).requires_grad_()], 0.1)
    adam.keep(torch.tensor([0, 2]))
    adam.add([torch.ones(1, 2)])
    (kept,) = adam.parameters
    assert kept.is_leaf and kept.requires_grad and kept.shape == (3, 2)


def test_batch_adam_keeps_a_zero_gradient_in_place() -> None:
    parameter = torch.ones(1, 2)
    BatchAdam([parameter], 0.1).step([torch.zeros(1, 2)])
    assert torch.equal(parameter, torch.ones(1, 2))


def test_batch_adam_takes_several_parameters() -> None:
    parameters = [torch.zeros(2, 3), torch.zeros(2, 4, 5)]
    BatchAdam(parameters, 0.1).step([torch.ones_like(parameter) for parameter in parameters])
    for parameter in parameters:
        torch.testing.assert_close(parameter, torch.full_like(parameter, -0.1))
