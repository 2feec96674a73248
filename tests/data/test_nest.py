import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch

from adaptive_tbptt.data import nest as st


@dataclasses.dataclass(frozen=True)
class Cell:
    h: torch.Tensor
    steps: int = 0


@dataclasses.dataclass
class Derived:
    h: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.doubled = 2 * self.h


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def t(*shape):
    return torch.randn(*shape)


def nests(rows):
    return {
        "tensor": t(rows, 4),
        "tuple": (t(2, rows, 4), t(2, rows, 3)),
        "list": [t(rows, 4), [t(rows)]],
        "dict": {"h": t(rows, 4), "more": {"c": t(1, rows, 4)}, "n": 3, "none": None},
        "dataclass": Cell(t(rows, 4), steps=7),
        "derived": Derived(t(rows, 4)),
        "defaultdict": collections.defaultdict(list, h=t(rows, 4), more=[t(1, rows)]),
        "namedtuple": Pair(t(rows, 4), t(rows, 4)),
        "shared": (t(rows, 4), t(5)),
    }


@pytest.mark.parametrize("name", nests(1))
def test_batch_dimension_is_found_and_rows_selected(name):
    one, two, five = (nests(n)[name] for n in (1, 2, 5))
    dims = st.batch_dims(one, two)
    rows = torch.tensor([4, 0])
    chosen = st.select_rows(five, rows, dims)
    assert type(chosen) is type(five)
    for picked, leaf, dim in zip(st.leaves(chosen), st.leaves(five), dims, strict=True):
        expected = leaf if dim is None else leaf.index_select(dim, rows)
        assert torch.equal(picked, expected)
    joined = st.join_rows([five, chosen], dims)
    for leaf, dim in zip(st.leaves(joined), dims, strict=True):
        assert dim is None or leaf.shape[dim] == 7


def test_what_is_not_a_tensor_passes_through():
    assert st.detach(Cell(t(2, 2), steps=7)).steps == 7
    assert st.detach({"n": 3, "none": None}) == {"n": 3, "none": None}
    assert st.detach(collections.defaultdict(list, n=3))["new"] == []


def test_mapping_leaves_the_original_as_it_was():
    for name, nest in nests(2).items():
        before = [leaf.clone() for leaf in st.leaves(nest)]
        doubled = st.map_leaves(lambda leaf: 2 * leaf, nest)
        for old, kept, new in zip(before, st.leaves(nest), st.leaves(doubled), strict=True):
            assert torch.equal(old, kept), name
            assert torch.equal(new, 2 * old), name


def test_detach_cuts_the_graph_and_shares_the_values():
    leaf = t(2, 3).requires_grad_()
    cut = st.detach((leaf * 2,))[0]
    assert not cut.requires_grad
    assert cut.grad_fn is None


def test_reset_returns_exactly_the_masked_rows_and_cuts_their_gradient():
    state = (t(2, 3, 4).requires_grad_(), t(3, 4).requires_grad_())
    start = (t(2, 3, 4).requires_grad_(), t(3, 4).requires_grad_())
    mask = torch.tensor([False, True, False])
    reset = st.reset_rows(state, mask, start, [1, 0])
    for new, old, begin, dim in zip(reset, state, start, [1, 0], strict=True):
        for row in range(3):
            source = begin if mask[row] else old
            assert torch.equal(new.select(dim, row), source.select(dim, row))
    sum(leaf.sum() for leaf in reset).backward()
    assert (state[0].grad[:, 1] == 0).all()
    assert (state[0].grad[:, [0, 2]] == 1).all()
    assert (start[1].grad[1] == 1).all()


def test_reset_does_not_leak_the_gradient_of_an_infinite_row():
    state = torch.tensor([[float("inf")], [1.0]], requires_grad=True)
    mask = torch.tensor([True, False])
    st.reset_rows(state, mask, torch.zeros(2, 1), [0]).exp().sum().backward()
    assert torch.isfinite(state.grad).all()


def test_an_ambiguous_batch_dimension_is_said():
    with pytest.raises(ValueError, match="state_batch_dim"):
        st.batch_dims(t(1, 1, 4), t(2, 2, 4))
