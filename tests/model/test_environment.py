"""What a file says of its making, and what runs must agree on about a model."""

import json
from types import SimpleNamespace

import pytest
import torch

from tl_localize.model.environment import about_model, environment, fingerprint, probe


def test_environment_is_json_and_names_versions_and_threads(gpt2_like):
    found = json.loads(json.dumps(environment(gpt2_like)))
    assert (found["device"], found["threads"]) == ("cpu", torch.get_num_threads())
    assert found["torch"] == torch.__version__


def test_about_a_model_is_json_and_names_the_weights(gpt2_like):
    found = json.loads(json.dumps(about_model(gpt2_like)))
    assert found["fingerprint"] == fingerprint(gpt2_like)
    assert len(found["fingerprint"]) == 16
    assert (found["model"], found["dtype"]) == ("gpt2-like", "float32")


def test_precision_is_known_where_torch_refuses_to_tell(monkeypatch, gpt2_like):
    def refuses():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    for new, old in (("tf32", "high"), ("ieee", "highest")):
        matmul = SimpleNamespace(fp32_precision=new)
        monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
        assert about_model(gpt2_like)["float32_matmul_precision"] == old


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


def buffer(model):
    model.register_buffer("rotation", torch.ones(1))


@pytest.mark.parametrize("change", [one_weight, columns, within_a_row, activation, buffer])
def test_fingerprint_sees_a_change(gpt2_like, change):
    before = fingerprint(gpt2_like)
    assert fingerprint(gpt2_like) == before
    change(gpt2_like)
    assert fingerprint(gpt2_like) != before


def test_fingerprint_does_not_see_where_a_model_comes_from(gpt2_like):
    before = fingerprint(gpt2_like)
    for name in ("model_name", "tokenizer_name", "device"):
        setattr(gpt2_like.cfg, name, "another")
    assert fingerprint(gpt2_like) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fingerprint_reads_every_dtype(gpt2_like, dtype):
    before = fingerprint(gpt2_like)
    gpt2_like.to(dtype)
    assert fingerprint(gpt2_like) != before


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 10 / 2**7)])
def test_probe_allows_for_the_rounding_of_the_dtype(gpt2_like, dtype, share):
    tokens = torch.arange(gpt2_like.cfg.n_ctx)[None] * 7919 % gpt2_like.cfg.d_vocab
    with torch.no_grad():
        largest = float(gpt2_like.to(dtype)(tokens).float().abs().max())
    assert probe(gpt2_like)[-1] == pytest.approx(share * largest)
