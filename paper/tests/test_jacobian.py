"""The norm of a step's Jacobian against the dense one, also where a kernel differentiates once."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import adaptive_tbptt as at
from atbptt_paper.decay import stability
from atbptt_paper.decay.jacobian import jacobian_norms


def dense_norms(recurrent, x, state):
    """The twin: the whole Jacobian of each row, then its largest singular value."""
    parts = recurrent.components(state)
    rows = next(iter(parts.values())).shape[0]
    leaves = [
        s.detach().requires_grad_() for s in (state if isinstance(state, tuple) else (state,))
    ]
    given = tuple(leaves) if isinstance(state, tuple) else leaves[0]
    after = recurrent.components(recurrent.core(x, given)[1])
    norms = []
    for row in range(rows):
        jacobian = []
        for part in after.values():
            for value in part[row]:
                gradient = torch.autograd.grad(value, leaves, retain_graph=True)
                jacobian.append(torch.cat([g[..., row, :].flatten() for g in gradient]))
        norms.append(torch.linalg.matrix_norm(torch.stack(jacobian), 2))
    return torch.stack(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layer", [nn.LSTM(3, 4, 2), nn.GRU(3, 4, 2), nn.RNN(3, 4)])
def test_jacobian_norms_equal_the_largest_singular_value(layer, dtype):
    recurrent = at.model.as_recurrent(layer.to(dtype))
    x = torch.randn(1, 5, 3, dtype=dtype)
    state = recurrent.initial_state(x)
    state = (
        tuple(torch.randn_like(s) for s in state)
        if isinstance(state, tuple)
        else torch.randn_like(state)
    )
    ours = jacobian_norms(recurrent, x, state, tolerance=1e-7, iterations=2000)
    torch.testing.assert_close(ours, dense_norms(recurrent, x, state).double(), rtol=1e-3, atol=0)


class Once(nn.Module):
    """tanh(x + W h) by a kernel whose backward pass cannot be differentiated."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, h, weight):
            out = torch.tanh(x + h @ weight.T)
            ctx.save_for_backward(out, h, weight)
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient):
            out, h, weight = ctx.saved_tensors
            inner = gradient * (1 - out * out)
            return inner, inner @ weight, inner.T @ h

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)

    def forward(self, inputs, state=None):
        state = torch.zeros_like(inputs[0]) if state is None else state
        state = self.Kernel.apply(inputs[0], state, self.weight)
        return state[None], state


class Beside(Once):
    """The same beside a residual, by a kernel that says nothing of second derivatives."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, h, weight):
            return Once.Kernel.forward(ctx, x, h, weight)

        @staticmethod
        def backward(ctx, gradient):
            out, h, weight = ctx.saved_tensors
            inner = gradient.detach() * (1 - out * out).detach()
            return tuple(g.detach() for g in (inner, inner @ weight, inner.T @ h))

    def forward(self, inputs, state=None):
        state = torch.zeros_like(inputs[0]) if state is None else state
        state = 0.3 * state + 0.7 * self.Kernel.apply(inputs[0], state, self.weight)
        return state[None], state


def test_a_kernel_whose_second_derivative_is_missing_beside_one_that_is_not():
    torch.manual_seed(0)
    model = Beside()
    state, x = torch.randn(4, 6), torch.randn(1, 4, 6)
    found = jacobian_norms(at.model.as_recurrent(model), x, state)
    slopes = 1 - torch.tanh(x[0] + state @ model.weight.T) ** 2
    jacobian = 0.3 * torch.eye(6) + 0.7 * slopes[:, :, None] * model.weight
    expected = torch.linalg.matrix_norm(jacobian, 2).double()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_differences_are_as_wide_as_the_state_is_large(size):
    class Linear(Once):
        class Kernel(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, h, weight):
                ctx.save_for_backward(weight)
                return h @ weight.T

            @staticmethod
            @once_differentiable
            def backward(ctx, gradient):
                return None, gradient @ ctx.saved_tensors[0], None

    torch.manual_seed(0)
    model = Linear()
    found = jacobian_norms(
        at.model.as_recurrent(model), torch.zeros(1, 4, 6), size * torch.randn(4, 6)
    )
    expected = torch.linalg.matrix_norm(model.weight, 2).double().expand(4)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-4), (torch.float32, 1e-2)])
def test_a_kernel_that_can_be_differentiated_only_once(dtype, rtol):
    torch.manual_seed(0)
    model = Once().to(dtype)
    state, x = torch.randn(4, 6, dtype=dtype), torch.randn(1, 4, 6, dtype=dtype)
    found = jacobian_norms(at.model.as_recurrent(model), x, state)
    slopes = 1 - torch.tanh(x[0] + state @ model.weight.T) ** 2
    expected = torch.linalg.matrix_norm(slopes[:, :, None] * model.weight, 2)
    torch.testing.assert_close(found, expected.double(), rtol=rtol, atol=0.0)


def test_a_clock_without_rows_is_no_part_of_a_rows_state():
    class Clocked(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.rate = nn.Linear(7, 4), nn.Parameter(torch.full((4,), 0.3))

        def forward(self, x, state):
            rows = x.shape[1]
            h, t = state or (x.new_zeros(rows, 4), torch.zeros(()))
            out = []
            for one in x:
                h = torch.tanh(0.5 * self.map(torch.cat([one, h], 1)) + torch.sin(self.rate * t))
                t = t + 1
                out.append(h)
            return torch.stack(out), (h, t)

    torch.manual_seed(0)
    model, x = Clocked(), torch.randn(30, 4, 3)
    largest = 0.5 * torch.linalg.matrix_norm(model.map.weight[:, 3:], 2)
    fit = at.fit_decay([0.5**k for k in range(11)])
    assert 0 < stability(model, x, fit, burn_in=5).jacobian_norm <= largest
