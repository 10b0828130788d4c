"""DEL of attention heads: plain loops, other ablations, what is refused, and the views that show
heads.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from architectures import tiny_bridge
from noise import letters

from tl_localize import AttentionHeads, Attribution, NeuronScores, RandomBaseline, Units, explore
from tl_localize.evals.ablation import ABLATIONS
from tl_localize.evals.deletion import confusion
from tl_localize.evals.settings import del_methods, del_ratios
from tl_localize.execution import Store
from tl_localize.model.neurons import NeuronView

HEADS = AttentionHeads()
MODELS = ("gpt2_like", "llama_like", "bridge")


@pytest.fixture(params=MODELS)
def model(request):
    return (
        tiny_bridge(1, {}) if request.param == "bridge" else request.getfixturevalue(request.param)
    )


def share_right(model, sequence, chosen=(), values=None):
    """Teacher-forced accuracy while some heads are set to values, by an assignment for each."""

    def put(act, hook, *, layer):
        act = act.clone()
        for at, head in chosen:
            if at == layer:
                act[:, :, head] = 0 if values is None else values[layer, head]
        return act

    hooks = [(f"blocks.{layer}.attn.hook_z", partial(put, layer=layer)) for layer in range(2)]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        predicted = model(sequence.tokens[None])[0, sequence.n_prefix - 1 : -1].argmax(-1)
    return float((predicted == sequence.suffix).float().mean())


@pytest.mark.parametrize(
    ("model", "ablation"),
    list(zip(MODELS, ["resample", "mean", "zero"], strict=True)),
    indirect=["model"],
)
def test_del_of_heads_ablates_heads(model, benchmark_of, general, ablation):
    benchmark = benchmark_of(model, ratios=(0.4,), units=HEADS, ablation=ablation, seed=3)
    frame = benchmark.run([Attribution(units=HEADS)]).frame
    assert set(frame["n_neurons"]) == {1}  # one of three or four heads of layer 1
    view = NeuronView(model, HEADS)
    sequences = benchmark.test_sequences
    intact = [share_right(model, sequence) for sequence in sequences]
    for method in (Attribution(units=HEADS), RandomBaseline(units=HEADS, seed=3)):
        for i, row in enumerate(frame[frame["method"] == method.name].itertuples()):
            chosen = list(method(model, sequences[i]).top_k(0.4, first_layer=1, rounding="floor"))
            values = ABLATIONS[ablation](general, 3, view, i)
            changes = [
                share_right(model, sequence, chosen, values) - before
                for sequence, before in zip(sequences, intact, strict=True)
            ]
            assert row.delta_self_accuracy == pytest.approx(changes[i], abs=1e-6)
            others = changes[:i] + changes[i + 1 :]
            assert row.delta_neg_accuracy == pytest.approx(sum(others) / len(others), abs=1e-6)


@torch.no_grad()
def test_mean_ablation_of_heads_is_the_mean_of_each_entry(model, general):
    _, cache = model.run_with_cache(general)
    wanted = torch.stack(
        [cache[f"blocks.{layer}.attn.hook_z"][:, 1:].mean((0, 1)) for layer in range(2)]
    )
    found = ABLATIONS["mean"](general, 0, NeuronView(model, HEADS), 0)
    torch.testing.assert_close(found, wanted)


def test_figure_of_heads_says_heads(gpt2_like, benchmark_of):
    results = benchmark_of(gpt2_like, ratios=(0.4,), units=HEADS).run([Attribution(units=HEADS)])
    assert results.units == HEADS
    label = confusion(results).axes[0].get_ylabel()
    assert label == "sequence whose heads are ablated"


def test_run_of_heads_is_resumed_and_not_mixed_with_neurons(gpt2_like, benchmark_of, tmp_path):
    heads = benchmark_of(gpt2_like, ratios=(0.4,), units=HEADS)
    first = heads.run([Attribution(units=HEADS)], Store(tmp_path))
    again = heads.run([Attribution(units=HEADS)], Store(tmp_path))
    assert first.frame.equals(again.frame)
    assert first.settings["units"] == {"class": "AttentionHeads"}
    with pytest.raises(ValueError, match=r"units: .*AttentionHeads.* in the folder, .*MLPN"):
        benchmark_of(gpt2_like, ratios=(0.4,)).run([Attribution()], Store(tmp_path))


@dataclass(frozen=True, eq=False, repr=False)
class Directions(Units):
    """A user's unit that holds tensors: how far a layer reaches along some directions. Its repr
    names none of them.
    """

    rows_of: list[torch.Tensor]  # of each layer, [direction d_model]
    name: ClassVar[str] = "directions"
    additive: ClassVar[bool] = True

    def __repr__(self):
        return "Directions('random')"

    def point(self, layer):
        return f"blocks.{layer}.hook_resid_post"

    def shape(self, model):
        return (len(self.rows_of[0]),)

    def rows(self, model, layer):
        return self.rows_of[layer]

    def read(self, act, layer):
        return (act @ self.rows_of[layer].T).relu()

    def write(self, act, units, layer):
        return act + (units - self.read(act, layer)) @ self.rows_of[layer]


def test_del_of_a_unit_with_tensors_is_a_plain_loop_and_is_resumed(
    llama_like, benchmark_of, tmp_path
):
    """Files of the store hold the unit's identity alone; what resumes has the tensors from the
    benchmark.
    """
    model = llama_like
    if "blocks.1.hook_resid_post" not in model.hook_dict:
        pytest.skip("this class has another name for the point")
    units = Directions(
        list(
            0.3 * torch.randn(2, 40, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
        )
    )
    method = Attribution(units=units)
    benchmark = benchmark_of(model, ratios=(0.25,), units=units)
    frame = benchmark.run([method]).frame
    for _ in range(2):
        again = benchmark.run([method], Store(tmp_path)).frame
        assert frame.drop(columns="seconds").equals(again.drop(columns="seconds"))
    assert set(frame["n_neurons"]) == {10} and frame["delta_self_accuracy"].abs().max() > 0

    def together(act, hook, chosen):
        return act - sum(
            (act @ row).clamp(min=0)[..., None] * row for row in units.rows_of[1][chosen]
        )

    for i, row in enumerate(frame[frame["method"] == "attribution"].itertuples()):
        target = benchmark.test_sequences[i]
        right = []
        chosen = method(model, target).top_k(0.25, first_layer=1).mask[1]
        for hooks in ([], [("blocks.1.hook_resid_post", partial(together, chosen=chosen))]):
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                argmax = model(target.tokens[None])[0, target.n_prefix - 1 : -1].argmax(-1)
            right.append(float((argmax == target.suffix).float().mean()))
        assert row.delta_self_accuracy == pytest.approx(right[1] - right[0], abs=1e-6)


def test_single_layer_of_heads(gpt2_like, benchmark_of):
    how = {"ratios": (0.4,), "units": HEADS, "layers": "each", "multiples": (1, 3)}
    frame = benchmark_of(gpt2_like, **how).run([Attribution(units=HEADS)]).single_layers
    assert sorted(set(frame["n_neurons"])) == [1, 3]


def test_del_refuses_what_is_of_other_units(gpt2_like, benchmark_of):
    heads = benchmark_of(gpt2_like, ratios=(0.4,), units=HEADS)
    with pytest.raises(ValueError, match=r"methods must score AttentionHeads\(\).* got MLPNeurons"):
        heads.run([Attribution()])
    with pytest.raises(ValueError, match=r"methods must score MLPNeurons\(\).* got AttentionHeads"):
        benchmark_of(gpt2_like, ratios=(0.4,)).run([Attribution(units=HEADS)])
    with pytest.raises(
        ValueError, match=r"scores must be of .*AttentionHeads\(\).* got .*MLPNeurons"
    ):
        heads.run([lambda model, sequence: NeuronScores(torch.rand(2, 3), "mine", sequence.id)])
    with pytest.raises(ValueError, match=r"ratio must select 1 to 3 heads, got 0\.1"):
        replace(heads, ratios=(0.1,))


def test_default_ratios_take_a_head_of_each_layer_and_iterative_attribution_covers_them():
    methods = {method.name: method for method in del_methods("all", units=HEADS)}
    assert all(method.units == HEADS for method in methods.values())
    for n_heads in (6, 8, 12, 16, 20, 25, 32, 64):
        few, many = (int(n_heads * ratio) for ratio in del_ratios("", HEADS))
        assert 1 <= few < many <= round(methods["iterative_attribution"].share * n_heads)


@pytest.mark.parametrize("model", ["llama_like"], indirect=True)
def test_explorer_measures_heads(model, recited):
    text, *others = recited(model)
    how = {"ratios": (0.4,), "decode": letters, "general": text.tokens[None]}
    view = explore(model, text, Attribution(units=HEADS)(model, text), others, **how)
    step = view.answer(["step", 0, 0, "1"])
    found = list(view.chosen(0, 0, "1"))
    own = view.data["accuracy"][0] + step["accuracy"][0]
    assert sum(step["layers"]) == len(found)
    assert own == pytest.approx(share_right(model, text, found), abs=2e-4)
    head = found[0]
    card = view.answer(["card", 0, *head])
    rows = model.blocks[head[0]].attn.W_O.detach()[head[1]]
    z = {}
    with (
        torch.no_grad(),
        model.hooks(
            fwd_hooks=[(f"blocks.{head[0]}.attn.hook_z", lambda act, hook: z.update(act=act))]
        ),
    ):
        model(text.tokens[None])
    assert card["writes"] == pytest.approx(
        (z["act"][0, :, head[1]] @ rows).norm(dim=-1).tolist(), abs=1e-3
    )
    assert view.data["units"] == ["head", "heads"] and "heads ablated" in view.html()


def test_explorer_refuses_scores_of_two_units(gpt2_like, sequence):
    both = [Attribution()(gpt2_like, sequence), Attribution(units=HEADS)(gpt2_like, sequence)]
    with pytest.raises(ValueError, match=r"scores must be of this model \(2, 48\), of neurons"):
        explore(gpt2_like, sequence, both, [], decode=letters)
