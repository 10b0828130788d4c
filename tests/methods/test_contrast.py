"""What general text needs, against texts written without a cache and gates taken one text at a
time.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch
from oracles import gate_gradient_of, mean_probability

from tl_localize import (
    ActivationContrast,
    Attribution,
    MemorizedSequence,
    MLPNeurons,
    SelectivePruning,
)
from tl_localize.methods import contrast
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.model.neurons import NeuronView


def plain_need(model, seed, begin=(), n_texts=4, length=8):
    """Root mean square over the texts that the model writes."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(61, (n_texts, 1), generator=generator)
    texts = torch.cat([torch.tensor(begin, dtype=torch.long).expand(n_texts, -1), texts], 1)
    draws = torch.rand(n_texts, 3 - len(begin), generator=generator)
    for n in range(length - 1 - len(begin)):
        with torch.no_grad():
            p = model(texts, return_type="logits", padding_side="right")[:, -1].softmax(-1)
        new = p.argmax(-1, keepdim=True)
        if n < draws.shape[1]:
            new = torch.searchsorted(p.cumsum(-1), draws[:, n, None].contiguous())
        texts = torch.cat([texts, new], 1)
    squares = torch.zeros(model.cfg.n_layers, model.cfg.d_mlp)
    for text in texts:
        squares += gate_gradient_of(model, MemorizedSequence(text, 4), mean_probability) ** 2
    return squares.sqrt() / squares.sqrt().mean()


def assert_divided(model, sequence, need):
    found = Attribution(contrast=2, seed=3)(model, sequence).values
    wanted = Attribution()(model, sequence).values / (1 + 2 * need**3)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_a_contrast_divides_by_what_general_text_needs(any_model, sequence):
    assert_divided(any_model, sequence, plain_need(any_model, seed=3))


def test_general_text_is_48_texts_of_64_tokens(make_model, sequence, all_general_text):
    """Or of as many as a model reads."""
    for n_ctx, length in ((32, 32), (70, 64)):
        model = make_model(1, n_ctx=n_ctx, n_layers=1)
        assert_divided(model, sequence, plain_need(model, seed=3, n_texts=48, length=length))


def test_units_that_look_alike_do_not_share_a_need(gpt2_like):
    @dataclass(frozen=True)
    class Some(MLPNeurons):
        factor: float = field(default=1.0, repr=False)

        def __repr__(self):
            return "Some()"

    first, second = NeuronView(gpt2_like, Some(1.0)), NeuronView(gpt2_like, Some(2.0))
    values = {id(first): torch.ones(2, 48), id(second): torch.zeros(2, 48)}

    def measure(neurons, given):
        return values[id(neurons)]

    for view in (first, second, first):
        assert torch.equal(contrast.measure_once(view, 0, measure), values[id(view)])


def test_texts_begin_as_the_models_own_do(gpt2_like, sequence, monkeypatch):
    plain = Attribution(contrast=2)(gpt2_like, sequence).values
    need = plain_need(gpt2_like, seed=0, begin=(7,))
    monkeypatch.setattr(contrast, "first_tokens", lambda tokenizer: [7])
    contrast._KEPT.clear()
    found = Attribution(contrast=2)(gpt2_like, sequence).values
    wanted = Attribution()(gpt2_like, sequence).values / (1 + 2 * need**3)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(found, plain, rtol=1e-2)
    contrast._KEPT.clear()


def test_a_hook_that_does_nothing_to_some_tokens_is_another_state(gpt2_like, sequence):
    """Of a rectifier's neurons many are silent on the tokens that the state is told by."""
    with torch.no_grad():
        gpt2_like.blocks[1].mlp.b_in[:5] = -100.0
    view = NeuronView(gpt2_like)
    states = [contrast._computation_key(view)]
    silent = {1: (torch.arange(48) >= 5).float()[None]}
    for _ in range(2):
        with view.scaled(silent):
            states.append(contrast._computation_key(view))
    states.append(contrast._computation_key(view))
    assert states[0] == states[3] and len(set(states)) == 3


def test_texts_are_written_once_until_a_weight_changes(gpt2_like, sequences, monkeypatch):
    written = []
    write = contrast.write_texts

    def counted(neurons, seed):
        written.append(1)
        return write(neurons, seed)

    monkeypatch.setattr(contrast, "write_texts", counted)
    method = Attribution(contrast=1)
    before = [scores.values for scores in method.map(gpt2_like, sequences, batch_size=1)]
    method(gpt2_like, sequences[0])
    ActivationContrast()(gpt2_like, sequences[0])
    assert len(written) == 1
    with gpt2_like.hooks(fwd_hooks=[("blocks.0.mlp.hook_post", lambda act, hook: act * 0.1)]):
        list(method.map(gpt2_like, sequences, batch_size=1))
    assert len(written) == 2
    gpt2_like.blocks[1].mlp.W_out.data[7] += 1
    method(gpt2_like, sequences[0])
    assert len(written) == 3
    gpt2_like.blocks[1].mlp.W_out.data[7] -= 1
    torch.testing.assert_close(method(gpt2_like, sequences[0]).values, before[0])


def test_a_row_that_few_tokens_meet_is_another_state(gpt2_like):
    view = NeuronView(gpt2_like)
    with torch.no_grad():
        gpt2_like.blocks[1].mlp.b_in[7] = -100.0  # a rectifier's neuron, silent
    row = gpt2_like.blocks[1].mlp.W_out[7].detach().clone()
    states = [contrast._computation_key(view)]
    for values in (row + 1, row):
        gpt2_like.blocks[1].mlp.W_out.data[7] = values
        states.append(contrast._computation_key(view))
    assert states[0] == states[2] != states[1]


def test_a_measure_made_with_a_setting_is_not_kept(gpt2_like, sequence):
    @dataclass(frozen=True)
    class Times(WithGeneralText):
        name = "times"
        factor: int = 1

        def attribute_batch(self, neurons, sequences, report):
            def measure(view, texts):
                return torch.full((len(texts), *view.size), float(self.factor))

            return self.general_mean(neurons, sequences, measure).expand(len(sequences), -1, -1)

    for factor in (1, 2):
        assert Times(factor=factor)(gpt2_like, sequence).values.unique().tolist() == [factor]


@pytest.mark.parametrize("kind", [ActivationContrast, SelectivePruning])
def test_another_seed_has_other_general_text_on_the_same_model(gpt2_like, sequence, kind):
    first, second = (kind(seed=seed)(gpt2_like, sequence).values for seed in (0, 1))
    assert not torch.equal(first, second)


def test_general_text_of_activation_contrast_is_written_after_one_token(gpt2_like):
    texts = ActivationContrast().general_text(NeuronView(gpt2_like))
    assert {text.n_prefix for text in texts} == {1}


def test_ones_own_general_text_is_read_whatever_ran_before(gpt2_like, sequence, sequences):
    @dataclass(frozen=True, kw_only=True)
    class Own(ActivationContrast):
        def general_text(self, neurons):
            return sequences[1:]

    wanted = Own()(gpt2_like, sequence).values
    ActivationContrast()(gpt2_like, sequence)
    assert torch.equal(Own()(gpt2_like, sequence).values, wanted)
    assert not torch.equal(ActivationContrast()(gpt2_like, sequence).values, wanted)


def test_texts_are_written_in_batches_where_memory_is_short(gpt2_like, monkeypatch):
    view = NeuronView(gpt2_like)
    wanted = contrast.write_texts(view, 0)
    generate, rows = contrast.generate, []

    def short_of_memory(model, context, n, uniform=None):
        rows.append(len(context))
        if len(context) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(model, context, n, uniform)

    monkeypatch.setattr(contrast, "generate", short_of_memory)
    with pytest.warns(RuntimeWarning, match="Out of memory with a batch of 4: going on with 2"):
        found = contrast.write_texts(view, 0)
    assert torch.equal(found, wanted) and max(rows) == len(wanted) == 4


@pytest.mark.parametrize("n_ctx", [2, 3, 4])
def test_a_model_of_few_positions_writes_short_texts(make_model, sequences, n_ctx):
    model = make_model(1, n_ctx=n_ctx)
    texts = contrast.write_texts(NeuronView(model), 0)
    assert texts.shape == (4, n_ctx)
    short = replace(sequences[0], tokens=sequences[0].tokens[:n_ctx], n_prefix=1)
    for method in (Attribution(contrast=1), ActivationContrast()):
        assert method(model, short).values.isfinite().all()


def test_a_text_that_the_model_cannot_read_tells_nothing_of_what_is_needed(gpt2_like, monkeypatch):
    view = NeuronView(gpt2_like)
    texts = contrast.write_texts(view, 0)
    gradients = contrast.gate_gradients

    def overflow(neurons, batch, objective):
        (found,) = gradients(neurons, batch, objective)
        return [torch.cat([torch.full_like(found[:1], torch.nan), found[1:]])]

    monkeypatch.setattr(contrast, "gate_gradients", overflow)
    found = contrast.general_need(view, 0)
    squares = torch.zeros_like(found)
    for text in texts[1:]:
        squares += gate_gradient_of(gpt2_like, MemorizedSequence(text, 4), mean_probability) ** 2
    torch.testing.assert_close(found, squares.sqrt() / squares.sqrt().mean(), rtol=1e-3, atol=1e-5)
