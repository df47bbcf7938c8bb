"""The engine: gathers, reduces and publishes units, each on its own lane and process group.

Decides: when an operation is issued and what it waits for. Does not decide routes (`topology.py`), memory (`unit.py`)
or the life of a module (`hooks.py`). Keeps invariants 1 (order of summation), 3, 5 and 10: nothing here changes a
weight; gradients become visible to an optimizer only through `finish_reduces`.

Four lanes: gather, reduce (inside nodes), reduce between nodes, publish.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..topology import Topology
from .lanes import Exposure, Lane, Ticket, make_lane
from .order_check import OrderCheck
from .parameter import OwnedParameter, require_unreplaced
from .passes import Passes
from .transport import PHASES, Transport
from .unit import Ranges, Unit, slice_of
from .wires import Control

logger = logging.getLogger(__name__)

# Gradient buffers of this many units may be in flight inside the node, and node sums of this many between nodes: while
# the computation waits for the oldest, the links have two more to go on with.
CONTRIBUTIONS_IN_FLIGHT = 2
NODE_SUMS_IN_FLIGHT = 3


def divide_factors(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """What gradients are divided by before and after they are summed in ``dtype``; ``factor`` in all.

    As FSDP2: sums of float16, whose range ends at 65504, are divided by about the root of the factor before, by powers
    of two that divide it; others at the end alone.
    """
    before = 1.0
    if dtype == torch.float16:
        while factor % before == 0 and factor / before > before:
            before *= 2
    return before, factor / before


class Engine:
    """Moves the units of one rank over ``transport``, and agrees with the other ranks over ``control``."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        units: list[Unit],
        transport: Transport,
        control: Control,
        device: torch.device,
        *,
        prefetch: int,
        reshard_after_forward: bool,
        publish_async: bool,
        gradient_divide_factor: float,
        clip: str = "joint",
        enclosing: Sequence[int] = (),
    ) -> None:
        """``units`` in declared forward order; ``enclosing``: those of the whole model, kept to the end of a pass."""
        self.topology, self.rank, self.units = topology, rank, units
        self.transport, self.control = transport, control
        self.device = device
        self.reshard_after_forward, self.publish_async = reshard_after_forward, publish_async
        self._divide_before, self._divide_after = divide_factors(gradient_divide_factor, units[0].reduce_dtype)
        self.is_last_backward = self.step_follows = True
        # Work on a unit's complete gradient in a lane of its own, during backward; what it returns is scratch.
        self.early: Callable[[Unit], Any] | None = None
        self.clip = clip  # which norm clips which gradients: see `clip.py`
        self.max_norm: float | None = None  # of the last clip
        self.clipped_to: float | None = None  # the norm that each piece has been clipped to since the last reduce
        self.has_optimizer = False
        self._unclaimed = 0  # backwards that reduced gradients without one
        self.uninitialized: set[str] = set()  # owned parameters that have no values yet
        self.stale = True  # holders' copies differ from the masters: publish before the next gather
        self.exposure = Exposure(device)
        self.sent = transport.sent
        self._lanes: dict[str, Lane] = {p: make_lane(p, device) for p in PHASES}
        self._order_check = OrderCheck(control.board)
        # Kept until the computation is ordered after their reduce: then their memory is free in stream order, and the
        # host, however far ahead, does not allocate more of them.
        self._contributions: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._node_sums: deque[tuple[Ticket, dict[int, Ranges]]] = deque()
        self._unfinished: set[int] = set()  # units with partial sums that have not been through level 2
        self._reduced: set[int] = set()  # units with gradients since the last step
        self._unattached: set[int] = set()  # of them, those whose masters do not have theirs yet
        self.kept = 0  # open blocks in which all is gathered: no unit is freed, and a forward needs no message
        self._norm: torch.Tensor | None = None  # of the gradients as reduced, if a clip has taken it
        self._some_rank_asks: torch.Tensor | None = None  # for an agreement; came with the norm
        self._finite: bool | None = None  # the answer, once read from the device
        self.is_busy: Callable[[Unit], bool] = lambda unit: False  # these two are replaced by the hooks
        self.reduces_gradients: Callable[[], bool] = lambda: True  # whether the backward that is running does
        reduces_gradients = lambda: topology.world > 1 and self.reduces_gradients()  # noqa: E731
        self.passes = Passes(units, enclosing, prefetch, self._gather, self._issue_reduce, reduces_gradients)
        self._prefetch = prefetch
        self._closed = False
        self._late: dict[int, torch.Tensor] = {}  # gradients that came after their unit's reduce, for the next one
        self._cells_gather = any(len(topology.cell(r)) > 1 for r in range(topology.world))

    # ---- what the hooks call ----

    def forward_begins(self) -> None:
        if self.kept:
            return
        if self.passes.forward.active:  # the last one raised: complete it, since other ranks may have been further
            self.forward_ends()
        self.passes.forward.begin()

    def forward_ends(self) -> None:
        if self.kept:
            return
        self.passes.forward_ends()
        if self.reshard_after_forward:
            self.free_idle()

    def backward_begins(self) -> None:
        self.passes.backward_begins()

    def next_forward_begins(self) -> None:
        """Within a backward that several forwards share: it comes to an earlier one."""
        self.passes.backward.begin_round()
        for unit in self.units:
            if unit.index not in self.passes.kept:
                self._free(unit)

    def need(self, unit: Unit, in_backward: bool) -> None:
        if in_backward or not self.kept:
            self._request(unit, in_backward)
        self._await_gather(unit)

    def _request(self, unit: Unit, in_backward: bool) -> None:
        order = self.passes.of(in_backward)
        order.request(unit.index)
        if not unit.gathered and unit.gathering is None:
            # Freed in this pass, or used outside a forward of the model: every rank must do the same. Within a pass
            # they ask each other first, and from then on the pass keeps the unit.
            if order.active and self._cells_gather:
                kind = "backward" if in_backward else "forward"
                self.control.board.agree(f"{kind} of step {self._order_check.step}: {unit.name} once more")
                self.passes.keep(unit.index)
            self._gather(unit.index)

    def done(self, unit: Unit, in_backward: bool) -> None:
        kept = self.passes.of(in_backward).active and unit.index in self.passes.kept
        if (in_backward or self.reshard_after_forward) and not kept:
            self._free(unit)

    def gradients_ready(self, unit: Unit) -> None:
        self.passes.backward.note_ready(unit.index)
        if self.passes.reduces.awaits(unit.index):  # otherwise they are late
            self.passes.reduces.ready([unit.index])

    def backward_over(self, reduces: bool) -> None:
        if reduces:
            self.passes.reduces.ready(self.passes.reduces.sequence)
            if not self.has_optimizer:
                self._unclaimed += 1
                if self._unclaimed == 2:
                    logger.warning(
                        "gradients of owned parameters are reduced, but nothing updates these parameters: call "
                        "owned.build_optimizer. An optimizer of model.parameters() passes them over"
                    )
        else:  # torch.autograd.grad, or nothing trainable: no rank reduces
            self.passes.reduces.reset()
        self.passes.backward.end()
        self.passes.reduces.finish()
        for unit in self.units:
            if unit.has_local_gradient():
                self.passes.backward.note_late(unit.index)
                self._late[unit.index] = self._contribution(unit)
        self.free_all()

    def pass_failed(self) -> None:
        """A backward raised: forget what it had not issued."""
        self.passes.reduces.reset()
        self.passes.backward.active = False
        self.free_all()

    # ---- gather ----

    def _gather(self, index: int) -> None:
        unit = self.units[index]
        if unit.gathered or unit.gathering is not None:
            return
        if self.stale:
            self.publish_all()
        unit.allocate()
        after = [unit.published] if unit.published is not None else []
        unit.gathering = self._submit("gather", unit, lambda: self._run_gather(unit), after)

    def _run_gather(self, unit: Unit) -> None:
        unit.fill_held()
        self.transport.gather(unit)

    def _await_gather(self, unit: Unit) -> None:
        require_unreplaced(unit.params)
        if unit.gathered:
            return
        self._wait_gather(unit)
        unit.expose()

    def _wait_gather(self, unit: Unit) -> None:
        if unit.published is not None:  # the part of the wait that is the publish's
            self.exposure.wait("publish", unit.published)
            unit.published = None
        assert unit.gathering is not None
        self.exposure.wait("gather", unit.gathering)
        unit.gathering = None

    def _free(self, unit: Unit) -> None:
        if self.kept:
            return
        if unit.gathering is not None:
            self._wait_gather(unit)
            unit.free()
        elif unit.gathered:
            unit.free()

    @property
    def frees_weights(self) -> bool:
        """Whether gathered weights are freed now, on any rank."""
        return self._cells_gather and not self.kept

    def free_all(self) -> None:
        for unit in self.units:
            self._free(unit)

    def free_idle(self) -> None:
        """Every unit but those that a forward or backward under way is in."""
        for unit in self.units:
            if not self.is_busy(unit):
                self._free(unit)

    def gather_all(self) -> None:
        """Every unit, for use outside a forward; a collective."""
        for unit in self.units:
            self._gather(unit.index)
        for unit in self.units:
            self._await_gather(unit)

    # ---- reduce ----

    def _issue_reduce(self, index: int) -> None:
        unit = self.units[index]
        self._await_all_but(CONTRIBUTIONS_IN_FLIGHT - 1, self._contributions)
        self._await_all_but(NODE_SUMS_IN_FLIGHT - 1, self._node_sums)
        unit.drop_scratch()
        self.clipped_to = None
        contrib, sums = self._contribution(unit), unit.partial
        ticket = self._submit("reduce", unit, lambda: self._reduce_in_node(unit, contrib, sums))
        unit.reducing.append(ticket)
        self._contributions.append((ticket, contrib))
        self._norm = self._finite = None
        self._unfinished.add(index)
        self._reduced.add(index)
        self._unattached.add(index)
        if self.is_last_backward:
            self._issue_between_nodes(unit, ticket)
        if self.passes.reduces.is_last(index):  # what comes behind, often a large embedding of FSDP2's, finds room
            self._await_all_but(CONTRIBUTIONS_IN_FLIGHT - 1, self._contributions)

    def _contribution(self, unit: Unit) -> torch.Tensor:
        """This rank's gradients, with those that were late before."""
        contrib = unit.take_gradients()
        if self._divide_before != 1:  # the counts of use too: they stay above zero
            contrib.div_(self._divide_before)
        if (late := self._late.pop(unit.index, None)) is not None:
            contrib.add_(late)
        return contrib

    def _await_all_but(self, count: int, in_flight: deque[tuple[Ticket, Any]]) -> None:
        """Order the computation after all but the last ``count`` operations, and let go of their buffers. This cannot
        deadlock: what is waited for comes earlier in the order that all ranks issue in."""
        while len(in_flight) > count:
            self.exposure.wait("reduce", in_flight[0][0])
            in_flight.popleft()

    def _issue_between_nodes(self, unit: Unit, after: Ticket) -> None:
        self._unfinished.discard(unit.index)
        sums, unit.partial = unit.partial, {}
        ticket = self._submit("reduce_between_nodes", unit, lambda: self._reduce_between_nodes(unit, sums), [after])
        unit.reducing.append(ticket)
        self._node_sums.append((ticket, sums))
        if self.early is not None and self.step_follows and unit.owned:
            early = self.early
            unit.early = self._early_lane.submit(lambda: early(unit), [unit.reducing[-1]])

    def _reduce_in_node(self, unit: Unit, contrib: torch.Tensor, sums: dict[int, Ranges]) -> None:
        """Level 1: contributions to their collector, added to its ``sums`` of earlier micro-batches."""
        for node, fresh in self.transport.reduce_in_node(unit, contrib).items():
            so_far = sums.setdefault(node, {})
            for span, total in fresh.items():
                if span in so_far:
                    so_far[span].add_(total)
                else:  # a slice of the contribution would keep all of it alive
                    so_far[span] = total.clone() if total.untyped_storage() is contrib.untyped_storage() else total

    def _reduce_between_nodes(self, unit: Unit, sums: dict[int, Ranges]) -> None:
        """Level 2: node ``sums`` to the owner, into its gradient."""
        for span in unit.layout.mastered(self.rank):
            if span not in unit.grad:
                unit.grad[span] = torch.zeros(span[1] - span[0], dtype=torch.float32, device=unit.device)
        if self.topology.ownership == "replica":  # each backward's sum goes to every replica's owner
            fresh: Ranges = {s: torch.zeros_like(t) for s, t in unit.grad.items()}
        else:
            fresh = unit.grad
        for span, total in self.transport.reduce_between_nodes(unit, sums).items():
            slice_of(fresh, *span).add_(total.div_(self._divide_after))
        if self.topology.ownership == "replica":
            self.transport.spread(unit, fresh, "reduce_between_nodes")
            for span, tensor in unit.grad.items():
                tensor.add_(fresh[span])

    def finish_reduces(self) -> bool:
        """Complete what is in flight and give owned pieces their gradients, zeros where no rank used a piece. False if
        no backward ran since the last step. A collective the first time and when a deferred reduce is left, otherwise
        local."""
        self._await_reduces()
        self._order_check.step_ends()
        if not self.passes.agreed:
            self._agree()
        for index in self._unattached:  # once: a gradient that somebody puts in its place stays
            self.units[index].attach_gradients()
        self._unattached.clear()
        return bool(self._reduced)

    def _await_reduces(self) -> None:
        for index in self.reduce_order():
            if index in self._unfinished:
                self._await_all_but(NODE_SUMS_IN_FLIGHT - 1, self._node_sums)
                self._issue_between_nodes(self.units[index], self.units[index].reducing[-1])
        for unit in (self.units[i] for i in sorted(self._reduced)):
            for ticket in unit.reducing:
                self.exposure.wait("reduce", ticket)
            unit.reducing.clear()
            if unit.early is not None:  # it reads the gradient, which a clip may change from here on
                self.exposure.wait("update", unit.early)
        self._contributions.clear()
        self._node_sums.clear()

    def drop_gradients(self) -> None:
        """Forget all gradients of owned parameters, reduced or not."""
        for unit in self.units:
            for ticket in unit.reducing:
                ticket.wait()
            unit.drop_scratch()
            unit.drop_gradients()
            for param in unit.params:
                param.weight.grad = None
        self._contributions.clear()
        self._node_sums.clear()
        self._unfinished.clear()
        self._reduced.clear()
        self._unattached.clear()
        self._late.clear()
        self._norm = self._some_rank_asks = self._finite = self.clipped_to = None

    def has_gradient(self, unit: Unit) -> bool:
        """Whether a backward has reduced the unit since the last step."""
        return unit.index in self._reduced

    def drop_gradient_of(self, unit: Unit, param: OwnedParameter) -> None:
        """Forget the gradient of one parameter."""
        for ticket in unit.reducing:
            ticket.wait()
        unit.drop_scratch()
        unit.drop_gradient_of(param)
        self._norm = self._finite = None

    def set_norm(self, norm: torch.Tensor) -> None:
        """The joint norm of the gradients as they are now: tells whether the next step is skipped."""
        self._norm, self._finite = norm, None

    def gradients_are_finite(self) -> bool:
        """Whether no gradient of this step is inf or nan, on any rank. A collective unless a clip took the norm."""
        while not self.gradients_are_complete():
            pass
        return bool(self._finite)

    def gradients_are_complete(self) -> bool:
        """Whether the norm was of all gradients, and no rank had late ones, which are reduced then. Also takes the
        gradients of pieces that no rank used away, so that an optimizer passes them over. A collective unless a clip
        took the norm. The one time in a step that the host reads from the device; later calls know the answer."""
        if self._finite is not None:
            return True
        if self._norm is None:
            self._norm = self.gradient_squares().sum()
        reduced = [self.units[i] for i in sorted(self._reduced)]
        flags = [f for unit in reduced for f in unit.used_flags()]
        assert self._some_rank_asks is not None
        told = torch.stack([self._norm.isfinite(), self._some_rank_asks > 0]).float()
        *used, finite, some_rank_asks = (torch.cat([*flags, told]) > 0).tolist()
        if some_rank_asks:
            self._norm = None
            self._agree()
            return False
        self._finite = finite
        for unit in reduced:
            count = len(unit.owned)
            unit.withhold_unused(used[:count])
            used = used[count:]
        return True

    def gradient_squares(self) -> torch.Tensor:
        """Squared norm of the reduced gradient of every piece in the cluster, in a fixed order; [pieces], float64, the
        same on every rank. A collective; the reduces must be finished. It also tells all ranks, in one more element,
        where one of them has something to agree on."""
        squares = torch.zeros(sum(len(u.pieces) for u in self.units) + 1, dtype=torch.float64, device=self.device)
        squares[-1] = bool(self._late) or self.passes.wants_agreement
        at = 0
        for unit in self.units:
            for position, key in enumerate(sorted(unit.pieces), start=at):
                # Under replica ownership several ranks hold the piece: the one that sums it counts.
                if key in unit.rooted and (grad := unit.master_of[key].grad) is not None:
                    squares[position] = torch.linalg.vector_norm(grad).double() ** 2
            at += len(unit.pieces)
        self.control.all_reduce(squares)
        self._some_rank_asks = squares[-1]
        return squares[:-1]

    @functools.cached_property
    def rider_mask(self) -> torch.Tensor:
        """1 for each rider, 0 for each other piece, in the order of :meth:`gradient_squares`; [pieces], float64."""
        flags = [u.pieces[key].rider for u in self.units for key in sorted(u.pieces)]
        return torch.tensor(flags, dtype=torch.float64, device=self.device)

    def _agree(self) -> None:
        """Agree with the other ranks on the order of passes, and reduce what came late. A collective."""
        for index in self.passes.agree(self.control, self._late):
            self._issue_reduce(index)
        self._await_reduces()

    def reduce_order(self) -> list[int]:
        """Units in the reverse of the first forward."""
        return self.passes.reduce_order

    def update_order(self) -> list[int]:
        """Units in forward order: the order of updates and publishes."""
        return self.passes.forward.units

    # ---- publish ----

    def publish(self, unit: Unit) -> None:
        """New masters of one unit to its holders. A collective. The unit is not gathered."""
        if unit.published is not None:  # nobody gathered the last one: its messages may still read the held copy
            unit.published.wait()
        unit.refresh_held()
        if self.topology.ownership == "replica":
            return  # every shard group has an owner of its own
        task = lambda: self.transport.spread(unit, unit.held, "publish")  # noqa: E731
        unit.published = self._submit("publish", unit, task)

    def publish_all(self) -> None:
        if self.uninitialized:
            raise RuntimeError(
                f"{min(self.uninitialized)} has no values yet ({len(self.uninitialized)} such parameters): "
                "call owned.initialize, or load a checkpoint, before the first forward"
            )
        self.stale = False
        for unit in self.units:
            self.publish(unit)

    def await_publishes(self) -> None:
        for unit in self.units:
            if unit.published is not None:
                self.exposure.wait("publish", unit.published)
                unit.published = None

    # ---- operations ----

    def _submit(self, phase: str, unit: Unit, task: Callable[[], None], after: Sequence[Ticket] = ()) -> Ticket:
        self.require_open()
        self._order_check.issue(phase, unit.name)
        step = self._order_check.step

        def named() -> None:
            try:
                task()
            except Exception as error:
                ranks = ", ".join(map(str, self.transport.peers(phase, unit)))
                raise RuntimeError(f"{phase} of {unit.name} in step {step}, with ranks {ranks}: {error}") from error

        return self._lanes[phase].submit(named, after)

    def take_sent(self) -> dict[tuple[str, str], int]:
        """Payload bytes this rank sent since the last call, by (phase, "intra_node" or "inter_node")."""
        sent = dict(self.sent)
        self.sent.clear()
        return sent

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Forwards without backward between steps, whose gathers and waits are in no figure of the steps. Publishes of
        the step before, which may still be under way, count as ever."""
        waited = self.exposure.take()
        gathers = {key: n for key, n in self.sent.items() if key[0] == "gather"}
        yield
        self.exposure.take()
        for phase, seconds in waited.items():
            self.exposure.add(phase, seconds)
        for key in [key for key in self.sent if key[0] == "gather"]:
            self.sent[key] = gathers.get(key, 0)

    def update_early(self, early: Callable[[Unit], Any]) -> None:
        """From now on run ``early(unit)`` when a unit's gradient is complete at its owners and a step follows. Its
        result is in ``unit.early`` after `finish_reduces`."""
        self.early = early
        self._early_lane = self._lanes["update"] = make_lane("update", self.device, high_priority=False)

    def require_open(self) -> None:
        """RuntimeError after :meth:`close`."""
        if self._closed:
            raise RuntimeError("owned.close() was called: no forward, backward or step of this model can follow it")

    def refuse_in_block(self, operation: str) -> None:
        """RuntimeError where ``operation`` would leave the weights shown in an open block behind."""
        if self.kept:
            raise RuntimeError(
                f"{operation} inside `with owned.gathered():` would leave the weights shown there behind. Call it "
                "after the block; to change weights in it, open it with `owned.gathered(write=True)` and change them "
                "in place"
            )

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
