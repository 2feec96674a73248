"""Folded gradients keep inner products: exactly up to a size, on average and nearly beyond."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from adaptive_tbptt.measure.fold import Fold

pytestmark = pytest.mark.usefixtures("double")


def folded(gradient, parameters, size, factor=1.0):
    fold = Fold(parameters, size)
    total = torch.zeros(fold.size)
    fold.add(gradient, total, factor)
    return total


def flat(gradient):
    return torch.cat([g.reshape(-1) for g in gradient])


def parameters_of(*shapes, prefix="p"):
    return {f"{prefix}{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}


def random_gradient(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in parameters.values()]


def test_up_to_the_size_a_gradient_is_kept_as_it_is():
    parameters = parameters_of((3, 4), (5,), (1, 2, 2))
    gradient = random_gradient(parameters)
    for size in (21, 1000):
        assert Fold(parameters, size).is_exact
        torch.testing.assert_close(
            folded(gradient, parameters, size), flat(gradient), rtol=0, atol=0
        )
    assert not Fold(parameters, 20).is_exact


@pytest.mark.parametrize("size", [16, 100, 1000])
def test_it_is_linear_and_unreached_parameters_leave_their_place_empty(size):
    parameters = parameters_of((30, 4), (50,), (7, 7))
    one, two = (random_gradient(parameters, seed) for seed in (0, 1))
    fold = Fold(parameters, size)
    total = torch.zeros(fold.size)
    fold.add(one, total, 2.0)
    fold.add([two[0], None, two[2]], total, -0.5)
    whole = [2 * one[0] - 0.5 * two[0], 2 * one[1], 2 * one[2] - 0.5 * two[2]]
    torch.testing.assert_close(total, folded(whole, parameters, size), rtol=1e-12, atol=1e-12)
    nothing = folded([None, None, None], parameters, size)
    assert not nothing.any()


@pytest.mark.parametrize("size", [64, 256])
def test_inner_products_are_right_on_average_and_nearly_so_each_time(size):
    """Over the signs, which the names decide."""
    shapes = ((40, 25), (300,), (20, 50))
    products, truth = [], None
    for draw in range(300):
        parameters = parameters_of(*shapes, prefix=f"{draw}.")
        a, b = (random_gradient(parameters, seed) for seed in (0, 1))
        b = [x + 0.5 * y for x, y in zip(b, a, strict=True)]
        truth = float(flat(a) @ flat(b))
        products.append(float(folded(a, parameters, size) @ folded(b, parameters, size)))
    norms = float(flat(a).norm() * flat(b).norm())
    error = np.std(products)
    assert abs(np.mean(products) - truth) < 4 * error / math.sqrt(300)
    # Var = (|a|^2 |b|^2 + <a, b>^2) / size for numbers that are spread evenly.
    expected = math.sqrt((norms**2 + truth**2) / size)
    assert error == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("shape", [(512, 64), (64, 512), (1024, 128)])
@pytest.mark.parametrize("which", ["row", "column"])
def test_numbers_in_one_row_or_column_are_spread_too(shape, which):
    """Folded at a multiple of its width, all of a column would meet in a few places."""
    errors = []
    for draw in range(40):
        parameters = parameters_of(shape, prefix=f"{draw}.")
        gradient = torch.zeros(shape)
        index = (3, slice(None)) if which == "row" else (slice(None), 3)
        gradient[index] = torch.randn(gradient[index].shape)
        square = float(folded([gradient], parameters, 1024).square().sum())
        errors.append(square / float(gradient.square().sum()) - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 2 * math.sqrt(2 / 1000)


def test_parameters_of_one_shape_have_signs_of_their_own():
    parameters = parameters_of((997,), (997,))  # would meet place by place
    a = torch.randn(997)
    square = float(folded([a, -a], parameters, 997).square().sum())
    assert square == pytest.approx(2 * float(a.square().sum()), rel=0.2)


def test_every_process_draws_the_same():
    parameters = parameters_of((40, 25), (300,))
    gradient = random_gradient(parameters)
    torch.manual_seed(1)
    one = folded(gradient, parameters, 64)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(folded(gradient, parameters, 64), one)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [64, 10_000])
def test_a_sparse_gradient_is_folded_as_the_dense_one_is(size):
    embedding = nn.Embedding(50, 8, sparse=True)
    ids = torch.tensor([3, 7, 3, 49])
    (sparse,) = torch.autograd.grad((embedding(ids) ** 3).sum(), embedding.weight)
    assert sparse.is_sparse
    parameters = {"weight": embedding.weight}
    ours = folded([sparse], parameters, size, 0.25)
    torch.testing.assert_close(ours, folded([sparse.to_dense()], parameters, size, 0.25))
    assert ours.any()


@pytest.mark.parametrize("size", [64, 10_000])
def test_a_complex_gradient_is_folded_as_pairs_are(size):
    gradient = torch.randn(40, 5, dtype=torch.cdouble)
    parameters, pairs = {"w": torch.zeros_like(gradient)}, {"w": torch.zeros(40, 5, 2)}
    for one in (gradient, gradient.conj(), gradient.t().contiguous().t()):
        ours = folded([one], parameters, size)
        theirs = folded([torch.view_as_real(one.resolve_conj())], pairs, size)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    other = torch.randn(40, 5, dtype=torch.cdouble)
    if size > 400:
        inner = folded([gradient], parameters, size) @ folded([other], parameters, size)
        assert float(inner) == pytest.approx(float((gradient.conj() * other).real.sum()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 10_000])
def test_narrow_formats_are_widened_before_anything_is_added(dtype, size):
    parameters = {"w": torch.zeros(60, 40)}
    gradient = (100 * torch.randn(60, 40)).to(dtype)
    ours = folded([gradient], parameters, size, factor=4096.0)  # past the largest float16
    theirs = folded([gradient.double()], parameters, size, factor=4096.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-9)


def test_a_transposed_gradient_is_read_in_the_order_of_its_parameter():
    parameters = {"w": torch.zeros(6, 5)}
    gradient = torch.randn(5, 6).t()
    torch.testing.assert_close(folded([gradient], parameters, 100), gradient.reshape(-1))
    contiguous = folded([gradient.contiguous()], parameters, 16)
    torch.testing.assert_close(folded([gradient], parameters, 16), contiguous)


def test_the_size_of_what_is_folded_is_a_prime():
    parameters = parameters_of((1000, 100))
    sizes = {16: 13, 17: 17, 64: 61, 2**14: 16381, 2**16: 65521}
    assert {size: Fold(parameters, size).size for size in sizes} == sizes


def test_fewer_than_sixteen_numbers_are_refused():
    with pytest.raises(ValueError, match="size must be at least 16, got 15"):
        Fold(parameters_of((3,)), 15)
