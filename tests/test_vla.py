"""A small vision-language-action model under plain FSDP2: towers of several widths, a tower called twice, an action
expert that runs between the language layers, dict inputs and outputs, a frozen part; equal to one process."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torchtitan_dmuon as dmuon
from tests.ranks import run_ranks

VISION, LANGUAGE, ACTION = 12, 16, 8
OWNED = r"(vision|language|action)\.\d+\.(up|down|cross)\.weight$"


class Layer(nn.Module):
    def __init__(self, dim: int, context: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.cross = nn.Linear(context, dim, bias=False) if context else None

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = inputs["x"]
        h = self.up(self.norm(x)).tanh()
        x = x + self.down(h)
        if self.cross is not None:
            x = x + self.cross(inputs["context"]).mean(1, keepdim=True)
        return {"x": x, "hidden": h}


class VLA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(6, VISION)
        self.vision = nn.ModuleList(Layer(VISION) for _ in range(2))
        self.project = nn.Linear(VISION, LANGUAGE)
        self.words = nn.Embedding(20, LANGUAGE)
        self.language = nn.ModuleList(Layer(LANGUAGE) for _ in range(3))
        self.state = nn.Linear(3, ACTION)
        self.action = nn.ModuleList(Layer(ACTION, LANGUAGE) for _ in range(3))
        self.actions = nn.Linear(ACTION, 3)

    def see(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image)
        for layer in self.vision:
            x = layer({"x": x})["x"]
        return self.project(x)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = torch.cat((self.see(batch["front"]), self.see(batch["wrist"]), self.words(batch["text"])), dim=1)
        a = self.state(batch["state"]).unsqueeze(1)
        for language, action in zip(self.language, self.action):
            x = language({"x": x})["x"]
            a = action({"x": a, "context": x})["x"]
        return {"actions": self.actions(a).squeeze(1), "features": x}


def make() -> VLA:
    torch.manual_seed(3)
    model = VLA()
    for p in model.vision[0].parameters():  # a frozen part, as pretrained towers are
        p.requires_grad_(False)
    return model


def batch(step: int, rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    inputs = {
        "front": torch.randn(2, 4, 6, generator=g),
        "wrist": torch.randn(2, 2, 6, generator=g),
        "text": torch.randint(0, 20, (2, 5), generator=g),
        "state": torch.randn(2, 3, generator=g),
    }
    return inputs, torch.randn(2, 3, generator=g)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, target = batch(step, rank)
    return (model(inputs)["actions"] - target).square().mean()


RULES = {
    "muon": functools.partial(dmuon.Muon, lr=0.02, ns_dtype="float32"),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def rest_of(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def train_owned(rank, world, shape, rule):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = make()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    units = [*model.vision, *model.language, *model.action]
    owned = dmuon.own_matrices(model, mesh, select=OWNED, units=units, mp_policy=policy)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=owned.parameters)
    optimizer = owned.build_optimizer(RULES[rule])
    rest = rest_of([p for p in model.parameters() if p.requires_grad and p not in owned.parameters])
    losses = []
    for step in range(4):
        loss = loss_of(model, step, rank)
        loss.backward()
        owned.clip_grad_norm_(model, 1.0)
        optimizer.step()
        rest.step()
        rest.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        after = loss_of(model, 9, rank).item()
    return losses, after, owned.masters(), optimizer.skipped_steps


def train_whole(world, rule):
    model = make()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = {n: p for n, p in trainable.items() if n.endswith(("up.weight", "down.weight", "cross.weight"))}
    optimizer, rest = (
        RULES[rule](list(matrices.values())),
        rest_of([p for n, p in trainable.items() if n not in matrices]),
    )
    losses = []
    for step in range(4):
        per_rank = [loss_of(model, step, r) for r in range(world)]
        (sum(per_rank) / world).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        for each in (optimizer, rest):
            each.step()
            each.zero_grad()
        losses.append([x.item() for x in per_rank])
    with torch.no_grad():
        after = [loss_of(model, 9, r).item() for r in range(world)]
    return losses, after, dict(model.named_parameters())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_a_vision_language_action_model_equals_one_process(shape, rule):
    world = shape[0] * shape[1]
    losses, after, weights = train_whole(world, rule)
    seen = set()
    for rank, (mine, mine_after, masters, skipped) in enumerate(run_ranks(train_owned, world, shape, rule, limit=60)):
        assert skipped == 0
        assert mine == pytest.approx([step[rank] for step in losses], rel=1e-4)
        assert mine_after == pytest.approx(after[rank], rel=1e-4)
        for key, value in masters.items():
            name = key.split("[")[0]
            reference = weights[name].detach()
            assert (value - reference).norm() <= 1e-5 * reference.norm(), name
            seen.add(name)
    # 8 layers of up and down, and the action expert's 3 cross projections; frozen ones are owned too, and unchanged.
    assert len(seen) == 2 * 8 + 3
