"""Parameters, pieces and matrices: layouts against explicit indexing, errors that name the parameter (cases 6, 7)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_dmuon.matrices import (
    WHOLE,
    MatrixLayout,
    OwnedSpec,
    Piece,
    canonical_name,
    count_matrices,
    select_names,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), max_size=4), st.integers(1, 6))
def test_split_and_join_are_inverse(groups, rows, n):
    layout = MatrixLayout(groups if rows else 1, tuple(rows))
    m = groups * sum(rows) if rows else 7
    tensor_MN = torch.arange(m * n, dtype=torch.float32).view(m, n)
    matrices = layout.split(tensor_MN)
    assert tuple(tuple(t.shape) for t in matrices) == layout.shapes((m, n))
    assert torch.equal(layout.join(matrices), tensor_MN)
    layout.validate("w", (m, n))


def test_fused_qkv_is_interleaved_by_key_value_head():
    # TorchTitan views wqkv as (n_kv, heads_per_kv + 2, head_dim, dim): per group its queries, then its key, then value.
    n_kv, per_kv, head_dim, dim = 2, 3, 4, 5
    layout = MatrixLayout(n_kv, (per_kv * head_dim, head_dim, head_dim))
    wqkv_MN = torch.randn(n_kv * (per_kv + 2) * head_dim, dim)
    q, k, v = layout.split(wqkv_MN)
    view = wqkv_MN.view(n_kv, per_kv + 2, head_dim, dim)
    assert torch.equal(q, view[:, :per_kv].reshape(-1, dim))
    assert torch.equal(k, view[:, per_kv].reshape(-1, dim))
    assert torch.equal(v, view[:, per_kv + 1].reshape(-1, dim))
    # And row by row: group g starts at row 20 g, with 12 query rows, 4 key rows, 4 value rows.
    assert torch.equal(q[12], wqkv_MN[20])
    assert torch.equal(k[4], wqkv_MN[20 + 12])
    assert torch.equal(v[7], wqkv_MN[20 + 19])


def test_rows_interleaved_one_by_one_and_contiguous_blocks():
    w_MN = torch.randn(8, 3)
    gate, up = MatrixLayout(4, (1, 1)).split(w_MN)
    assert torch.equal(gate, w_MN[0::2])
    assert torch.equal(up, w_MN[1::2])
    first, second = MatrixLayout(1, (6, 2)).split(w_MN)
    assert torch.equal(first, w_MN[:6])
    assert torch.equal(second, w_MN[6:])
    assert first.data_ptr() == w_MN.data_ptr()  # contiguous blocks are views
    assert WHOLE.split(w_MN)[0] is w_MN


def test_a_transposed_tensor_is_split_by_value():
    w_MN = torch.randn(3, 8).T
    gate, up = MatrixLayout(4, (1, 1)).split(w_MN)
    assert torch.equal(gate, w_MN[0::2])
    assert torch.equal(up, w_MN[1::2])


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        # Case 7: gated attention has four blocks; three of them do not cover the rows.
        (MatrixLayout(1, (2048, 256, 256)), (4608, 64), r"^attention\.wqkv: .*2560 rows, but dim 0 has 4608"),
        (MatrixLayout(3, (4, 1)), (16, 4), r"^attention\.wqkv: .*15 rows, but dim 0 has 16"),
        (MatrixLayout(0), (4, 4), r"^attention\.wqkv: groups and block rows must be positive"),
        (MatrixLayout(1, (5, -1)), (4, 4), r"^attention\.wqkv: groups and block rows must be positive"),
        (MatrixLayout(2), (4, 4), r"^attention\.wqkv: .*groups without rows"),
        (WHOLE, (4,), r"^attention\.wqkv: .*2 or 3 non-empty dimensions, .*got \(4,\)"),
        (WHOLE, (2, 2, 2, 2), r"^attention\.wqkv: .*2 or 3 non-empty dimensions, or is a convolution"),
        (WHOLE, (0, 4), r"^attention\.wqkv: .*2 or 3 non-empty dimensions"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(layout, shape, message):
    with pytest.raises(ValueError, match=message):
        OwnedSpec("attention.wqkv", shape, layout)


def test_layout_is_validated_on_two_dimensions_only():
    with pytest.raises(ValueError, match=r"^w: a matrix layout needs a 2-D tensor, got shape \(2, 3, 4\)"):
        WHOLE.validate("w", (2, 3, 4))


def test_join_refuses_another_number_of_matrices():
    with pytest.raises(ValueError, match="got 3 matrices to join, expected 2"):
        MatrixLayout(1, (2, 2)).join([torch.zeros(2, 1)] * 3)


def test_split_of_another_shape_is_refused():
    with pytest.raises((ValueError, RuntimeError)):
        MatrixLayout(2, (2, 1)).split(torch.zeros(7, 2))


def test_views_write_into_the_tensor():
    tensor, layout = torch.zeros(6, 2), MatrixLayout(2, (2, 1))
    for number, view in enumerate(layout.views(tensor), 1):
        view.fill_(number)
    assert tensor[:, 0].tolist() == [1, 1, 2, 1, 1, 2]
    assert [m.shape[0] for m in layout.split(tensor)] == [4, 2]


def test_a_convolution_is_one_piece_of_its_flattened_matrix():
    (piece,) = OwnedSpec("patch", (8, 3, 2, 2), flatten=True).pieces()
    assert (piece.shape, piece.stop, piece.matrices()) == ((8, 12), 8, ((8, 12),))
    (piece,) = OwnedSpec("patch", (8, 3, 4), MatrixLayout(rows=(4, 4)), flatten=True).pieces()
    assert piece.matrices() == ((4, 12), (4, 12))


def test_experts_are_pieces_of_one_row_range_each():
    spec = OwnedSpec("experts.w13", (3, 8, 5), MatrixLayout(1, (4, 4)))
    pieces = spec.pieces()
    assert [(p.start, p.stop) for p in pieces] == [(0, 1), (1, 2), (2, 3)]
    assert all(p.shape == (8, 5) and p.matrices() == ((4, 5), (4, 5)) for p in pieces)
    assert count_matrices(pieces) == 6
    assert sum(p.numel for p in pieces) == 3 * 8 * 5
    assert len({p.key for p in pieces}) == 3
    assert sorted(p.key for p in pieces) == [p.key for p in pieces]


def test_a_weight_is_one_piece_of_all_its_matrices():
    (piece,) = OwnedSpec("wqkv", (12, 5), MatrixLayout(2, (4, 1, 1))).pieces()
    assert (piece.start, piece.stop, piece.shape) == (0, 12, (12, 5))
    assert piece.matrices() == ((8, 5), (2, 5), (2, 5))
    assert piece == Piece("wqkv", 0, 12, (12, 5), MatrixLayout(2, (4, 1, 1)))


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("layers.0.w.weight", "layers.0.w.weight"),
        ("layers.0._checkpoint_wrapped_module.w.weight", "layers.0.w.weight"),
        ("_orig_mod.layers.0._orig_mod._checkpoint_wrapped_module.w", "layers.0.w"),
        ("module.layers.0.w", "layers.0.w"),
        ("module._orig_mod.layers.0.w", "layers.0.w"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("layers.0.module.w", "layers.0.module.w"),  # a user's own submodule of that name
        ("layers.0.w_orig_mod.weight", "layers.0.w_orig_mod.weight"),
    ],
)
def test_wrappers_leave_no_trace_in_names(name, canonical):
    assert canonical_name(name) == canonical
    assert canonical_name(canonical) == canonical


def test_wrapped_modules_have_the_names_of_bare_ones():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    bare = [name for name, _ in model.named_parameters()]
    model[1] = checkpoint_wrapper(model[1])
    wrapped = [name for name, _ in torch.nn.ModuleDict({"module": model}).named_parameters()]
    assert wrapped != bare
    assert [canonical_name(name) for name in wrapped] == bare


def test_names_are_selected_in_order_and_a_pattern_that_matches_nothing_is_an_error():
    shapes = {"layers.1.wo": (4, 4), "layers.0.wo": (4, 4), "norm": (4,)}
    assert select_names(shapes, r"layers\.\d+\.wo") == ["layers.1.wo", "layers.0.wo"]
    with pytest.raises(ValueError, match=r"'w13' matches no parameter; names look like: layers\.1\.wo"):
        select_names(shapes, "w13")
