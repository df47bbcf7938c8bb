"""What a state dict holds of a weight that others own, in whole or by rows: each operation that moves boxes equals that
of an ordinary tensor, on what is here; what needs the rest raises with the name and writes nothing."""

from __future__ import annotations

import copy
import io
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_dmuon.runtime.partial import PartialTensor, rows_of

SHAPE = (4, 6, 5)
HOLDINGS = [(), (0, 2), (3,), (0, 1, 2, 3)]
VALUE = torch.arange(120.0).view(SHAPE) + 1

# What DCP, `v.to(dtype)` of a last save, Hugging Face converters and people do to a stack [E, M, N].
MOVES = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "cpu": lambda x: x.cpu(),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "to copy": lambda x: x.to("cpu", copy=True),
    "float": lambda x: x.double().float(),
    "deepcopy": copy.deepcopy,
    "index": lambda x: x[2],
    "index from the end": lambda x: x[-1],
    "index of a matrix": lambda x: x[2, 1:4],
    "ellipsis": lambda x: x[..., 1],
    "None": lambda x: x[None],
    "range": lambda x: x[1:3],
    "empty range": lambda x: x[:, 3:1],
    "steps": lambda x: x[::2],
    "list": lambda x: x[[2, 0]],
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 2])),
    "select": lambda x: x.select(0, 3),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "narrow columns": lambda x: x.narrow(2, 1, 2),
    "split": lambda x: torch.split(x, 1, dim=0),
    "split in parts": lambda x: x.split([1, 3]),
    "split, then squeeze": lambda x: [t.squeeze() for t in torch.split(x, 1, dim=0)],
    "split columns": lambda x: x.split(2, dim=-1),
    "chunk": lambda x: x.chunk(3),
    "unbind": lambda x: x.unbind(),
    "iteration": lambda x: list(x),
    "split and stack": lambda x: torch.stack([t.squeeze(0) for t in x.split(1)], dim=0),
    "stack in the middle": lambda x: torch.stack([x, x], dim=1),
    "cat": lambda x: torch.cat([x[:2], x[1:]], dim=0),
    "cat columns": lambda x: torch.cat([x, x], dim=-1),
    "transpose": lambda x: x.transpose(-2, -1),
    "mT": lambda x: x.mT,
    "transpose rows": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "movedim": lambda x: x.movedim(0, -1),
    "t of a slice": lambda x: x[0].t(),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze": lambda x: x.squeeze(),
    "view": lambda x: x.view(4, 30),
    "reshape": lambda x: x.reshape(4, 2, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten all": lambda x: x.flatten(),
    "contiguous transpose": lambda x: x.mT.contiguous(),
}


def check(found: object, expected: object, mask: object) -> None:
    """Every element that is here has its value, and those are here that the mask says."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for each in zip(found, expected, mask, strict=True):
            check(*each)
        return
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not isinstance(found, PartialTensor):
        assert torch.equal(found, expected) and bool(mask.all())
        return
    here = torch.zeros(expected.shape)
    for offset, part in found.parts.items():
        box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape))
        assert torch.equal(part, expected[box]), offset
        here[box] += 1
    assert torch.equal(here, mask.to(here.dtype))


def held(rows: tuple[int, ...]) -> tuple[PartialTensor, torch.Tensor]:
    mask = torch.zeros(SHAPE)
    mask[list(rows)] = 1
    return rows_of(SHAPE, {r: VALUE[r].clone() for r in rows}, "layers.0.w", VALUE.dtype, VALUE.device), mask


@pytest.mark.parametrize("rows", HOLDINGS, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_moving_boxes_is_what_it_is_for_an_ordinary_tensor(name: str, rows: tuple[int, ...]) -> None:
    partial, mask = held(rows)
    check(MOVES[name](partial), MOVES[name](VALUE), MOVES[name](mask))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(MOVES)), min_size=2, max_size=5), st.sampled_from(HOLDINGS))
def test_chains_of_moves(names: list[str], rows: tuple[int, ...]) -> None:
    found, mask = held(rows)
    expected = VALUE
    for name in names:
        try:
            after = MOVES[name](expected)
            after_mask = MOVES[name](mask)
        except (IndexError, RuntimeError, ValueError):  # not possible for this shape
            continue
        if not isinstance(after, torch.Tensor):
            continue
        try:
            found = MOVES[name](found)
        except RuntimeError as error:  # a view that boxes cannot follow
            assert "layers.0.w" in str(error)
            return
        expected, mask = after, after_mask
        check(found, expected, mask)


def test_views_share_memory_and_copies_do_not() -> None:
    partial, _ = held((0, 2))
    for view in (partial[2], partial.split(1)[2].squeeze(), partial.mT[2].t(), torch.stack(partial.unbind())[2]):
        view.fill_(-1.0)
        assert bool((partial.parts[2, 0, 0] == -1).all())
        partial.parts[2, 0, 0].copy_(VALUE[2:3])
    partial.clone()[2].fill_(0)
    copy.deepcopy(partial)[2].fill_(0)
    assert torch.equal(partial[2], VALUE[2])


def test_copies_into_boxes_take_what_they_need() -> None:
    target, mask = held((0, 2))
    target.zero_()
    assert not target[2].any()
    target.copy_(VALUE)
    check(target, VALUE, mask)
    target.copy_(held((0, 2))[0] * 2)
    check(target, VALUE * 2, mask)
    with pytest.raises(RuntimeError, match=r"layers\.0\.w: copying from it needs all of \(4, 6, 5\)"):
        target.copy_(held((0,))[0])
    nothing, _ = held(())
    assert nothing.copy_(VALUE) is nothing and nothing.mul_(2) is nothing


def save(partial: torch.Tensor) -> None:
    torch.save({"w": partial}, io.BytesIO())


NEEDS_ALL = {
    "torch.save": save,
    "pickle to a process": lambda x: ForkingPickler.dumps(x),
    "into a weight": lambda x: torch.zeros(SHAPE).copy_(x),
    "sum": lambda x: x.sum(),
    "norm": lambda x: x.norm(),
    "equal": lambda x: torch.equal(x, VALUE),
    "add": lambda x: x + VALUE,
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[1, 0, 0].item() + x[0, 0, 0].item(),
    "matmul": lambda x: x @ torch.zeros(5, 2),
}


@pytest.mark.parametrize("rows", HOLDINGS[:3], ids=str)
@pytest.mark.parametrize("name", NEEDS_ALL)
def test_what_needs_all_raises_with_the_name(name: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"layers\.0\.w"):
        found = NEEDS_ALL[name](held(rows)[0])
        if isinstance(found, PartialTensor) and not found.parts:  # nothing of nothing: still no value to be had
            found.tolist()


@pytest.mark.parametrize("rows", HOLDINGS, ids=str)
def test_safetensors_writes_all_or_nothing(rows: tuple[int, ...], tmp_path) -> None:
    path = tmp_path / "w.safetensors"
    if len(rows) < 4:
        with pytest.raises(RuntimeError, match=r"layers\.0\.w: reading its memory needs all"):
            save_file({"w": held(rows)[0]}, path)
        assert not path.exists()


def test_a_tensor_whose_boxes_are_all_here_is_an_ordinary_one_where_values_are_asked_for() -> None:
    partial, _ = held((0, 1, 2, 3))
    assert torch.equal(partial, VALUE) and partial.sum() == VALUE.sum()
    file = io.BytesIO()
    torch.save(partial, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is torch.Tensor and torch.equal(loaded, VALUE)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", HOLDINGS, ids=str)
def test_staging_copies_the_boxes_and_the_copy_may_leave_the_process(rows: tuple[int, ...], shared: bool) -> None:
    """As for `async_mode = "async"`, and with shared memory and a process as for pinned memory, which needs CUDA."""
    stager = DefaultStager(StagingOptions(False, shared, False, False))
    partial, mask = held(rows)
    for factor in (1, 2):  # the second time into buffers kept from the first
        staged = stager.stage({"model": {"w": partial, "other": torch.ones(2)}})
        check(staged["model"]["w"], VALUE * factor, mask)
        partial.mul_(2)
        check(staged["model"]["w"], VALUE * factor, mask)
        sent = ForkingPickler.loads(ForkingPickler.dumps(staged))["model"]["w"]
        check(sent, VALUE * factor, mask)
    stager.close()
