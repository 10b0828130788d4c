"""What a file says of its making, and what runs must agree on about a model."""

import json

import pytest
import torch

from tl_localize.model.environment import about_model, environment, fingerprint


def test_environment_is_json_and_names_versions_and_threads(gpt2_like):
    found = json.loads(json.dumps(environment(gpt2_like)))
    assert (found["device"], found["threads"]) == ("cpu", torch.get_num_threads())
    assert found["torch"] == torch.__version__


def test_about_a_model_is_json_and_names_the_weights(gpt2_like):
    found = json.loads(json.dumps(about_model(gpt2_like)))
    assert found["fingerprint"] == fingerprint(gpt2_like)
    assert len(found["fingerprint"]) == 16
    assert (found["model"], found["dtype"]) == ("gpt2-like", "float32")


def one_weight(model):
    model.blocks[0].mlp.W_out.data[0, 0] += 1


def columns(model):
    weights = model.blocks[1].mlp.W_out
    weights.data = weights.data.flip(1)


def within_a_row(model):
    row = model.blocks[1].mlp.W_out.data[3]
    row.copy_(row.roll(1))


def activation(model):
    model.cfg.act_fn = "relu"


@pytest.mark.parametrize("change", [one_weight, columns, within_a_row, activation])
def test_fingerprint_sees_a_change(gpt2_like, change):
    before = fingerprint(gpt2_like)
    assert fingerprint(gpt2_like) == before
    change(gpt2_like)
    assert fingerprint(gpt2_like) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fingerprint_reads_every_dtype(gpt2_like, dtype):
    before = fingerprint(gpt2_like)
    gpt2_like.to(dtype)
    assert fingerprint(gpt2_like) != before
