"""Whole weights out of an owned model: as transformers saves them, and where a rank alone cannot have them."""

import io
import tempfile

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from .harness import assert_same, on_ranks, optimizers_of, shard, train, train_whole
from .test_language import CASES


def saved_by(rank, _world, name, folder):
    """Train, export as a whole, and say what the exports of one rank alone did instead."""
    case = CASES[name]
    model = case.build()
    owned = shard(case, model)
    train(case, model, owned, optimizers_of(model, owned), rank)
    state = owned.full_state_dict(cpu_offload=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    silent = []
    with tempfile.TemporaryDirectory() as elsewhere:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for export in (lambda: torch.save(state, io.BytesIO()), lambda: model.save_pretrained(elsewhere)):
            try:
                export()
            except RuntimeError as error:
                silent.append(not any(owned_name in str(error) for owned_name in owned.names))
            else:
                silent.append(True)
    owned.close()
    return set(state), silent


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe"])
def test_save_pretrained(name, figures):
    whole = train_whole(CASES[name])
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(saved_by, name, folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for keys, silent in results:
        assert keys == set(loaded.state_dict())
        assert silent == [False, False]
    shown = dict(loaded.named_parameters())
    for key, value in whole.weights.items():
        parameter, _, row = key.partition("[")
        weight = shown[parameter]
        assert_same((weight[int(row[:-1])] if weight.ndim == 3 else weight).detach(), value)
    figures(f"{len(shown)} parameters saved whole, {len(whole.weights)} owned pieces equal to one process")
