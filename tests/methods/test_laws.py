"""What holds for every entry of METHODS, on every family of models."""

import gc
import inspect
import linecache
import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import parameter_of
from rivals import SHORT_RIVALS, TEXTS, UNLEARNED

from tl_localize import (
    METHODS,
    IntegratedGradients,
    Localizer,
    MemorizedSequence,
    NeuronScores,
    NotRecitedWarning,
    ZeroOut,
    accuracy,
)
from tl_localize.files import identity_text
from tl_localize.methods import contrast

SHORT = SHORT_RIVALS | {
    "hard_concrete": {"steps": 2, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 2, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "integrated_gradients": {"steps": 2},
    "gradient_alignment": {"points": 2},
    "iterative_attribution": {"rounds": 2},
    "refined_attribution": {"steps": 2},
}
TRAINED = ("hard_concrete", "slimming")
ONE_PASS = (
    "activations",
    "attribution",
    "contrastive_gradient",
)  # one forward pass for a batch of sequences


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param](**SHORT.get(request.param, {}))


def close(method, found, wanted):
    """Equal to float tolerance: Adam turns noise in the last digits into steps, where a gradient is
    nearly zero.
    """
    tolerance = 2e-3 if method.name in (*TRAINED, *UNLEARNED) else 2e-6
    torch.testing.assert_close(found.values, wanted.values, atol=tolerance, rtol=1e-4)


def scored(method, model, sequence):
    """Scores for a text, whether the model recites it or not."""
    return next(method.map(model, [sequence], check=False))


def raising(after, error):
    """A user's hook that raises at its ``after``-th call."""
    calls = [0]

    def hook(act, hook):
        calls[0] += 1
        if calls[0] > after:
            raise error
        return act

    return hook


# ---- what comes back


def test_method_scores_every_neuron_and_the_same_seed_gives_the_same_bits(
    any_model, sequence, method, unchanged
):
    parameter_of(any_model.blocks[1].mlp.W_in).requires_grad_(False)
    check = unchanged(any_model)
    before = torch.get_rng_state()
    scores = method(any_model, sequence)
    values = scores.values
    assert values.shape == (any_model.cfg.n_layers, any_model.cfg.d_mlp)
    assert values.isfinite().all() and values.dtype == torch.float32 and values.device.type == "cpu"
    assert (values.std(dim=1) > 0).all()
    assert (scores.method, scores.sequence_id, scores.settings) == (
        method.name,
        sequence.id,
        identity_text(method),
    )
    assert torch.equal(method(any_model, sequence).values, values)
    assert torch.equal(torch.get_rng_state(), before)
    check()


@pytest.mark.parametrize("name", ["random", "hard_concrete", *UNLEARNED])
def test_method_other_seed_other_scores(gpt2_like, sequence, name):
    first, second = (
        METHODS[name](**SHORT.get(name, {}), seed=seed)(gpt2_like, sequence).values
        for seed in (0, 1)
    )
    assert not torch.equal(first, second)
    of_numpy = METHODS[name](**SHORT.get(name, {}), seed=np.int64(1))(gpt2_like, sequence).values
    assert torch.equal(of_numpy, second)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "row_norm"])
def test_method_scores_depend_on_the_sequence(gpt2_like, make_sequences, name):
    method = METHODS[name](**SHORT.get(name, {}))
    first, second = method.map(gpt2_like, make_sequences((9, 3), (9, 3)), check=False)
    assert not torch.equal(first.values, second.values)


# ---- texts that the model does not recite


def recited(model, sequence):
    """The sequence with a suffix that the model recites."""
    tokens = sequence.tokens.clone()
    for position in range(sequence.n_prefix, len(tokens)):
        with torch.no_grad():
            tokens[position] = model(tokens[None, :position])[0, -1].argmax()
    return replace(sequence, tokens=tokens)


def test_method_warns_once_of_a_text_that_the_model_does_not_recite(normless, sequence, method):
    with pytest.warns(NotRecitedWarning) as told:
        method(normless, sequence)
    (warning,) = told
    share = float(accuracy(normless, sequence))
    assert f"accuracy of at least 0.9, got {share:.2f} in {sequence!r}" in str(warning.message)
    assert "NotRecitedWarning" in str(warning.message)


def test_the_warning_names_the_line_that_localizes(gpt2_like, sequence):
    method = METHODS["random"]()
    with pytest.warns(NotRecitedWarning) as of_call:
        method(gpt2_like, sequence)
    with pytest.warns(NotRecitedWarning) as of_map:
        method.map(gpt2_like, [sequence])
    lines = [linecache.getline(told.filename, told.lineno).strip() for (told,) in (of_call, of_map)]
    assert lines == ["method(gpt2_like, sequence)", "method.map(gpt2_like, [sequence])"]


def test_of_many_texts_one_warning_is_given_for_one_pass(gpt2_like, sequences, method):
    known = [recited(gpt2_like, sequence) for sequence in sequences]
    passes = []
    with gpt2_like.hooks(
        fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: passes.append(1))]
    ):
        method.map(gpt2_like, [known[0], *sequences], check=False)
        assert not passes
        with pytest.warns(NotRecitedWarning, match="and less than that in 4 of 5") as told:
            method.map(gpt2_like, [known[0], *sequences])
    assert len(told) == len(passes) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_of_a_recited_text_no_warning_is_given(normless, sequence, method):
    method(normless, recited(normless, sequence))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_benchmark_does_not_warn_of_what_it_injects(gpt2_like, make_inj):
    results = make_inj(gpt2_like, max_steps=1).run([METHODS["activations"]()])
    assert not results.frame["converged"].any()


# ---- many sequences


@pytest.mark.parametrize(
    ("any_model", "batch_size"), [("gpt2_like", None), ("llama_like", 2)], indirect=["any_model"]
)
def test_map_equals_single_calls(any_model, sequences, method, batch_size):
    """Of the third family see the test of padding."""
    three = sequences[:3]
    alone = [scored(method, any_model, sequence) for sequence in three]
    together = method.map(any_model, three, batch_size=batch_size, check=False)
    for found, wanted in zip(together, alone, strict=True):
        close(method, found, wanted)


def test_a_whole_number_is_the_setting_that_it_is():
    one = METHODS["attribution"](contrast=1)
    assert repr(one.contrast) == "1.0" and identity_text(one) == identity_text(
        METHODS["attribution"](contrast=1.0)
    )
    assert repr(METHODS["slimming"](steps=2).steps) == "2"


def test_batch_tokens_do_not_matter(llama_like, sequence, method):
    few = replace(method, batch_tokens=25)
    wanted = scored(method, llama_like, sequence)
    close(method, scored(few, llama_like, sequence), wanted)


@settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(length=st.integers(2, 8), longer=st.integers(11, 16), seed=st.integers(0, 9), data=st.data())
@pytest.mark.parametrize("name", METHODS)
def test_padding_never_changes_a_score(neox_like, make_sequences, name, length, longer, seed, data):
    method = METHODS[name](**SHORT.get(name, {}))
    sequence, long = make_sequences(
        (length, data.draw(st.integers(1, length - 1))), (longer, 1), seed=seed
    )
    together = method.map(neox_like, [sequence, long], check=False)
    close(method, next(together), scored(method, neox_like, sequence))


@dataclass(frozen=True, kw_only=True)
class Gives(Localizer):
    name: ClassVar[str] = "gives"
    what: str = "nothing"

    def attribute(self, neurons, sequence):
        rows = [torch.zeros(neurons.n_neurons) for _ in range(neurons.n_layers)]
        return {"nothing": None, "a list": rows, "by layer": dict(enumerate(rows))}[self.what]


@pytest.mark.parametrize("what", ["nothing", "a list", "by layer"])
def test_what_is_no_tensor_is_named(normless, sequence, what):
    with pytest.raises(TypeError, match=r"attribute must return a tensor .*torch.stack"):
        Gives(what=what)(normless, sequence)


def test_map_progress_rises_to_one(normless, sequences, method):
    seen = []
    list(method.map(normless, sequences, batch_size=2, progress=seen.append, check=False))
    assert seen == sorted(seen) and seen[-1] == 1 and min(seen) >= 0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_map_names_the_sequence_whose_numbers_are_not_finite(gpt2_like, name):
    method = METHODS[name](**SHORT.get(name, {}))
    if name == "iterative_attribution":  # its contrast depends on every token
        method = replace(method, contrast=0)
    if name == "activation_contrast":  # and so do texts of the model
        method = replace(method, texts=TEXTS)
    gpt2_like.W_E.data[3] = torch.nan
    good = MemorizedSequence(torch.tensor([5, 6, 7, 8, 9]), 2, "a")
    bad = MemorizedSequence(torch.tensor([5, 3, 7, 8]), 2, "b")
    with pytest.raises(ValueError, match=r"must be finite, got .*'b'"):
        list(method.map(gpt2_like, [good, bad], check=False))


# ---- nothing is left behind


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_method_leaves_the_model_as_it_was_when_it_raises(any_model, sequence, unchanged, name):
    method = METHODS[name](**SHORT.get(name, {}))
    after = 0 if name in ONE_PASS else 1
    any_model.add_hook("blocks.1.hook_resid_post", raising(after, ValueError("the user's")))
    check = unchanged(any_model)
    with pytest.raises(ValueError, match="the user's"):
        scored(method, any_model, sequence)
    check()


def test_method_keeps_the_users_hooks(normless, sequence, method, unchanged):
    seen = []

    def hook(act, hook):
        seen.append(1)

    normless.add_hook("blocks.0.mlp.hook_post", hook)
    check = unchanged(normless)
    method(normless, sequence)
    check()
    seen.clear()
    normless(sequence.tokens)
    assert seen == [1]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_method_scores_the_model_with_the_users_hooks(neox_like, sequence, name):
    method = METHODS[name](**SHORT.get(name, {}))
    before = scored(method, neox_like, sequence).values
    with neox_like.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: act * 0.3)]):
        after = scored(method, neox_like, sequence).values
    assert (after - before).abs().max() > 1e-5


def test_map_has_no_hook_on_the_model_between_two_scores(normless, sequences, method, unchanged):
    check = unchanged(normless)
    for _ in method.map(normless, sequences[:2], batch_size=1, check=False):
        check()


def test_what_takes_one_text_after_the_other_gives_each_at_once(gpt2_like, sequences):
    for method in (ZeroOut(), IntegratedGradients(steps=2)):
        done = []
        scores = method.map(gpt2_like, sequences, progress=done.append, check=False)
        next(scores)
        assert done[-1] == pytest.approx(1 / len(sequences))


def test_method_does_not_mind_the_callers_gradient_mode(normless, sequence, method):
    wanted = scored(method, normless, sequence)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(method, scored(method, normless, sequence), wanted)


# ---- memory


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_out_of_memory_changes_nothing_but_a_warning(
    normless, sequences, unchanged, monkeypatch, name
):
    given = {"steps": 4} if name == "integrated_gradients" else SHORT.get(name, {})
    method = METHODS[name](**given)
    wanted = list(method.map(normless, sequences, check=False))
    check = unchanged(normless)
    forward = type(normless.blocks[1]).forward
    calls = [0]

    def failing(self, resid, *args, **kwargs):
        is_large = len(resid) > 2  # two texts have to fit
        calls[0] += is_large
        if is_large and calls[0] in (1, 3):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, resid, *args, **kwargs)

    monkeypatch.setattr(type(normless.blocks[1]), "forward", failing)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all tests' garbage, which takes long
    if name in ("activations", *TRAINED):
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of") as caught:
            found = list(method.map(normless, sequences, check=False))
        assert len(caught) == 1
    else:
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of"):
            found = list(method.map(normless, sequences, check=False))
    for scores, expected in zip(found, wanted, strict=True):
        close(method, scores, expected)
    check()


# ---- plain data


def test_method_is_plain_data_that_names_its_source(method):
    assert pickle.loads(pickle.dumps(method)) == method
    other = replace(method, batch_tokens=5)
    assert other == method and repr(other) == repr(method)
    assert "Source:" in (inspect.getdoc(type(method)) or "")


# ---- precision


def test_method_scores_models_of_other_precision(neox_like, sequence, method, monkeypatch):
    monkeypatch.setattr(contrast, "N_TEXTS", 24)  # little text ranks few neurons clearly
    monkeypatch.setattr(contrast, "LENGTH", 16)
    wanted = scored(method, neox_like, sequence).values
    neox_like.to(torch.bfloat16)
    neox_like.cfg.dtype = torch.bfloat16
    found = scored(method, neox_like, sequence).values
    assert torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1] > 0.9


def test_method_of_the_users_own_needs_attribute_only(gpt2_like, sequences):
    from dataclasses import dataclass
    from typing import ClassVar

    @dataclass(frozen=True, kw_only=True)
    class Mine(Localizer):
        name: ClassVar[str] = "mine"
        scale: float = 2.0

        def attribute(self, neurons, sequence):
            return torch.full((neurons.n_layers, neurons.n_neurons), self.scale * len(sequence))

    assert [float(scores.values[0, 0]) for scores in Mine().map(gpt2_like, sequences)] == [
        18,
        28,
        10,
        22,
    ]


TOGETHER = (*TRAINED, *UNLEARNED, "iterative_attribution", "refined_attribution")


@pytest.mark.parametrize("name", METHODS)
def test_scores_say_from_which_layer_on_a_method_chose(neox_like, sequence, name):
    method = METHODS[name](**SHORT.get(name, {}))
    if name not in TOGETHER:
        assert scored(method, neox_like, sequence).first_layer is None
        return
    scores = scored(replace(method, first_layer=1), neox_like, sequence)
    assert scores.first_layer == 1
    assert not scores.top_k(0.2, per="model").mask[0].any()
    with pytest.raises(ValueError, match="first_layer must be 1"):
        scores.top_k(0.2, first_layer=0)


def test_a_layer_that_a_method_of_ones_own_began_at_stays(gpt2_like, sequence):
    class Late(Localizer):
        name = "late"

        def attribute(self, neurons, sequence):
            return NeuronScores(torch.rand(neurons.size), first_layer=1)

    scores = Late()(gpt2_like, sequence)
    assert scores.first_layer == 1 and scores.method == "late"
    assert not scores.top_k(0.5, per="model").mask[0].any()


def test_a_method_that_returns_scores_of_other_sequences_is_refused(gpt2_like, sequence):
    class Short(Localizer):
        name = "short"

        def attribute_batch(self, neurons, sequences, report):
            return torch.zeros(1, *neurons.size)

    with pytest.raises(ValueError, match=r"attribute_batch must return scores of all 2 sequences"):
        list(Short().map(gpt2_like, [sequence, sequence], check=False))
