"""Erasing: what is promised of the edit, of its price, and of the folder that is written."""

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import KINDS, config_of, random_model, tiny_bridge
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy

from tl_localize import (
    AttentionHeads,
    IterativeAttribution,
    NeuronScores,
    NeuronSet,
    accuracy,
    erase,
    inject,
    load_model,
    perplexity,
    precision_of,
)
from tl_localize.erasure import Price, RowEdit, measure_texts, measures
from tl_localize.erasure.erase import Goal, State, Trial, mean_scores, nearest_to_price
from tl_localize.erasure.measures import kl_of_edit
from tl_localize.methods import Attribution, ZeroOut, contrast
from tl_localize.model.environment import fingerprint
from tl_localize.model.forward import as_bridge
from tl_localize.model.loading import is_as_loaded
from tl_localize.model.neurons import NeuronView
from tl_localize.texts.known import MIN_ACCURACY, first_example, origin_of
from tl_localize.texts.reference import held_out_tokens


@pytest.fixture(scope="module")
def general():
    return torch.randint(1, 256, (6, 10), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def how(texts, general):
    free = {"max_others_lost": 100, "max_perplexity_rise": 1e6}
    return {"others": texts[1:], "general_tokens": general, "method": Attribution(), **free}


@pytest.fixture(scope="module")
def brief(model, texts, how):
    """An erasure of two steps, for tests of what is done with one."""
    return erase(model, texts[0], max_steps=2, **how)


@pytest.fixture(scope="module")
def of_four_steps(model, texts, how):
    return erase(model, texts[0], share=0.3, max_steps=4, **how)


@pytest.mark.parametrize(
    ("edit", "left", "training"),
    [("rows", 0.3, {"share": 0.3, "learning_rate": 0.02}), ("ablate", 0.95, {})],
)
def test_erase_forgets_the_text_and_leaves_the_model_as_it_was(
    model, texts, how, edit, left, training, unchanged
):
    check = unchanged(model)
    erasure = erase(model, texts[0], edit=edit, **training, **how)
    check()
    assert accuracy(model, texts[0]) == 1
    with erasure.applied(model):
        assert accuracy(model, texts[0]) <= left
        measured = measure_texts(model, texts[:1])
        with erasure.edit.undone(model):
            assert accuracy(model, texts[0]) == 1
    check()
    assert erasure.texts["after"].equals(measured)
    assert erasure.within_price and not erasure.neurons.mask[0].any()  # layer 0 is left out


def test_only_the_rows_of_the_best_neurons_of_each_text_are_trained(model, texts, how):
    erasure = erase(model, texts[:2], share=0.1, max_steps=4, **how)
    values = [Attribution()(model, text).values[1] for text in texts[:2]]
    best = torch.cat([own.topk(4).indices for own in values]).unique()  # 4 of 40 neurons of layer 1
    assert len(best) > 4
    assert erasure.neurons.mask.nonzero().tolist() == [[1, i] for i in best.tolist()]
    assert torch.equal(erasure.edit.old_rows, model.blocks[1].mlp.W_out[best])
    assert (erasure.edit.rows != erasure.edit.old_rows).any(1).all()


@dataclass(frozen=True)
class Returns:
    """A method of one's own that returns what is no set of scores of this model."""

    kind: str

    def __call__(self, model, sequence):
        values = Attribution()(model, sequence).values
        return values if self.kind == "tensor" else NeuronScores(values[:, 1:])


@pytest.mark.parametrize(("kind", "error"), [("tensor", TypeError), ("other shape", ValueError)])
def test_what_a_method_returns_is_checked(model, texts, how, kind, error):
    with pytest.raises(error, match=r"must return NeuronScores|scores must be of"):
        erase(model, texts[0], **how | {"method": Returns(kind)})


def test_ablation_takes_the_smallest_set_of_the_order(model, texts, how):
    erasure = erase(model, texts[0], edit="ablate", max_recited=0.95, **how)
    assert not erasure.edit.rows.any()
    scores = Attribution()(model, texts[0])
    wanted = scores.top_k(count=len(erasure.neurons), per="model", first_layer=1)
    assert erasure.neurons == wanted
    with scores.top_k(count=len(wanted) - 1, per="model", first_layer=1).dropped_out(model):
        assert accuracy(model, texts[0]) > 0.95


SLOWLY = {"share": 0.5, "learning_rate": 0.0005, "max_recited": 0}


@pytest.fixture(scope="module")
def priced(model, texts, how):
    """``priced(edit, **bounds)``: an erasure that goes on as far as the bounds let it, and what it
    said on its way; each is computed once.
    """

    @cache
    def of(edit, **bounds):
        said = []
        training = SLOWLY if edit == "rows" else {"max_recited": 0}
        training = training | {"progress": lambda done, text: said.append(text)}
        return erase(model, texts[0], edit=edit, **how | training | bounds), said

    return of


@pytest.mark.parametrize("edit", ["rows", "ablate"])
@pytest.mark.parametrize("bound", [{"max_perplexity_rise": 3}, {"max_others_lost": 1}])
def test_an_edit_ends_at_its_price(priced, edit, bound):
    free, _ = priced(edit)
    ((name, limit),) = bound.items()
    assert getattr(free.watched, name.removeprefix("max_")) > limit
    found, _ = priced(edit, **bound)
    assert found.within_price


def test_the_last_step_is_taken_as_far_as_the_price_allows():
    one = NeuronSet(torch.ones(1, 1, dtype=torch.bool))

    class OnALine(Trial):
        def judge(self, neurons, rows):
            return State(neurons, rows, 1 - float(rows), Price(float(rows), 0.0))

    trial = OnALine(None, [], None, Goal(0.0, Price(0.7, 0.0)))
    looks = [trial.judge(one, torch.full((1, 1), value)) for value in (-1.0, 0.0, 1.0)]

    def found(states):
        return float(nearest_to_price(trial, states, lambda fraction, text: None).rows)

    assert found(looks) == 11 / 16
    assert found(looks[1:]) == 11 / 16  # the first look passes the price
    assert found(looks[:2]) == 0  # none does
    farther = [looks[1], trial.judge(one, torch.full((1, 1), 16.0))]
    assert found(farther) == 1  # none keeps it: the nearest to the model as it is


def test_an_edit_goes_beyond_its_last_look_within_the_price(model, texts, how, priced):
    """It ends between two looks, nearer to the price than any of them."""
    found, said = priced("rows", max_perplexity_rise=3)
    between = [text for text in said if text.startswith("between two steps")]
    assert len(between) == 4
    last = erase(model, texts[0], **how | SLOWLY, max_steps=found.settings["steps"] - 2)
    assert last.watched.perplexity_rise < found.watched.perplexity_rise <= 3
    assert not torch.equal(last.edit.rows, found.edit.rows)


def test_the_price_is_what_others_lose_and_general_text_gains(model, texts, how, general):
    how = how | {"share": 1, "learning_rate": 0.02, "max_steps": 8, "max_recited": 0}
    erasure = erase(model, texts[0], **how)
    watched, unseen = texts[1:][::2], texts[1:][1::2]
    was = [perplexity(model, part) for part in (general[::2], general[1::2])]
    with erasure.applied(model):
        lost = [100 * float(1 - accuracy(model, part).mean()) for part in (watched, unseen)]
        now = [perplexity(model, part) for part in (general[::2], general[1::2])]
    assert min(lost) > 1
    for price, own, old, new in zip((erasure.watched, erasure.price), lost, was, now, strict=True):
        assert price.others_lost == pytest.approx(own, abs=1e-3)
        assert price.perplexity_rise == pytest.approx(100 * (new / old - 1), rel=1e-3)


def test_trained_rows_follow_a_plain_loop(model, texts, how, monkeypatch):
    """Three steps of Adam on both losses, each with other general text, at a rate that grows."""
    monkeypatch.setattr(contrast, "N_TEXTS", 16)
    model = copy.deepcopy(model)  # one that has written nothing
    written = contrast.written_texts(NeuronView(model), 0)
    assert len(written) == 16
    erasure = erase(model, texts[:2], max_steps=3, share=0.2, learning_rate=0.002, **how)
    assert erasure.settings["steps"] == 3
    chosen = erasure.neurons.mask[1].nonzero().flatten()
    change = torch.zeros_like(erasure.edit.rows, requires_grad=True)
    acts = []

    def logits(tokens):
        hooks = [
            ("blocks.1.mlp.hook_post", lambda act, hook: acts.append(act)),
            ("blocks.1.hook_mlp_out", lambda out, hook: out + acts[-1][..., chosen] @ change),
        ]
        return model.run_with_hooks(tokens[None], fwd_hooks=hooks, return_type="logits")[0, :-1]

    adam = torch.optim.Adam([change], lr=0.002)
    for step in range(3):
        gone, held = [], []
        for text in texts[:2]:
            right = logits(text.tokens).softmax(-1).gather(-1, text.tokens[1:, None])
            gone.append(-(1 - right[text.n_prefix - 1 :]).log().mean())
        for row in written[(8 * step) % 16 :][:8]:
            held.append(cross_entropy(logits(row)[3:], row[4:]))
        adam.zero_grad()
        (torch.stack(gone).sum() + torch.stack(held).mean()).backward()
        adam.step()
        adam.param_groups[0]["lr"] *= 1.1
    torch.testing.assert_close(
        erasure.edit.rows - erasure.edit.old_rows, change.detach(), rtol=1e-3, atol=1e-5
    )


def test_each_step_unlearns_the_text_and_holds_general_text(model, texts, how, monkeypatch):
    module = import_module("tl_localize.erasure.erase")
    used = []
    add = module.add_gradients

    def spy(view, rows, some, objective, weight):
        used.append((objective.__name__, len(some), some[0].tokens.tolist()))
        add(view, rows, some, objective, weight)

    monkeypatch.setattr(module, "add_gradients", spy)
    erase(model, texts[0], max_steps=2, **how)
    assert [step[:2] for step in used] == [("mean_unlikelihood", 1), ("batch_loss", 4)] * 2
    assert used[0][2] == texts[0].tokens.tolist()


def test_a_price_that_no_edit_keeps_is_told_and_nothing_is_written(model, texts, how, tmp_path):
    how = how | {"max_others_lost": 0, "max_perplexity_rise": 0}
    erasure = erase(model, texts[0], share=1, learning_rate=0.5, max_steps=2, **how)
    assert not erasure.within_price
    with pytest.raises(ValueError, match=re.escape(f"price, got one where {erasure.watched}. ")):
        erasure.save(tmp_path / "edited")
    assert not list(tmp_path.iterdir())
    erasure.save(tmp_path / "edited", force=True)
    assert (tmp_path / "edited" / "erased.md").is_file()
    modes = {file.stat().st_mode for file in (tmp_path / "edited").iterdir()}
    assert len(modes) == 1  # whoever reads one of the files reads all


def test_measures_at_the_end_are_of_texts_that_the_search_did_not_see(
    model, texts, general, of_four_steps
):
    erasure = of_four_steps
    held_out = texts[1:][1::2]
    assert erasure.measured["before"]["perplexity"] == perplexity(model, general[1::2])
    with erasure.applied(model):
        assert erasure.measured["after"]["others_accuracy"] == accuracy(model, held_out).mean()
        assert erasure.measured["after"]["perplexity"] == perplexity(model, general[1::2])


def test_the_same_seed_gives_the_same_bits(model, texts, how, of_four_steps):
    again = erase(model, texts[0], share=0.3, max_steps=4, **how)
    assert torch.equal(again.edit.rows, of_four_steps.edit.rows)


def test_the_mean_of_screened_scores_is_exact_where_each_text_has_an_exact_one(model, texts):
    method = ZeroOut(screen=0.1, screen_sample=1)
    each = list(method.map(model, texts[:2]))
    found = mean_scores(each)
    assert found.exact == each[0].exact & each[1].exact
    assert found.exact != each[0].exact  # each text screens its own
    assert torch.equal(found.values, (each[0].values + each[1].values) / 2)
    assert mean_scores([Attribution()(model, texts[0])]).exact is None


# ---- what is measured


def test_measures_of_a_text_by_hand(model, texts):
    wrong = texts[0].tokens.clone()
    wrong[4 + 3] = (wrong[4 + 3] + 1) % 256
    found = measure_texts(model, [texts[0], replace(texts[0], tokens=wrong, id="wrong")])
    assert found["exact"].tolist() == [True, False]
    assert found["extracted"].tolist() == [1, 3 / 12]
    assert found["distance"][0] == 0
    assert found["accuracy"][0] == 1


def test_half_of_a_prefix_is_its_second_half(model, texts):
    """What counts is what greedy decoding gives after the last two of four tokens."""
    found = measure_texts(model, texts)
    for text, row in zip(texts, found.to_dict("records"), strict=True):
        tokens = text.prefix[None, 2:]
        for _ in text.suffix:
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        right = (tokens[0, 2:] == text.suffix).int()
        assert row["half_extracted"] == pytest.approx(float(right.cumprod(0).sum() / len(right)))
        assert row["half_exact"] == bool(right.all())
        assert (row["half_distance"] == 0) == row["half_exact"]
    assert found["exact"].all() and not found["half_exact"].all()


@torch.no_grad()
def test_kl_is_that_of_the_definition(model, general):
    neurons = NeuronSet(torch.arange(80).reshape(2, 40) < 3)
    old = model.blocks[0].mlp.W_out[:3].clone()
    edit = RowEdit(neurons, torch.zeros(3, 16), old)
    before = model(general).log_softmax(-1)
    with edit.applied(model):
        after = model(general).log_softmax(-1)
    wanted = (before.exp() * (before - after)).sum(-1).mean()
    assert kl_of_edit(model, lambda: edit.applied(model), general) == pytest.approx(
        float(wanted), rel=1e-3
    )


def test_precision_is_the_share_of_the_change_in_the_true_rows(gpt2_like, make_model, sequence):
    after = make_model(1, model_name="gpt2-like")
    injection = inject(after, sequence, ratio=0.1, seed=0, learning_rate=0.05, max_steps=3)
    with injection.applied(after):
        assert precision_of(gpt2_like, after, injection.neurons) == pytest.approx(1)
        half = NeuronSet(injection.neurons.mask.clone())
        half.mask[0] = False
        changes = [
            float((new.mlp.W_out - old.mlp.W_out).detach().square().sum())
            for new, old in zip(after.blocks, gpt2_like.blocks, strict=True)
        ]
        assert precision_of(gpt2_like, after, half) == pytest.approx(changes[1] / sum(changes))
    with pytest.raises(ValueError, match="before must differ from the model"):
        precision_of(gpt2_like, after, injection.neurons)


def test_precision_of_an_edit_in_half_precision_is_whole(make_model):
    before, after = (make_model(1, model_name="gpt2-like").to(torch.bfloat16) for _ in range(2))
    noise = 0.013 * torch.randn(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        after.blocks[1].mlp.W_out[3, :16] += noise
    truth = NeuronSet(torch.zeros(2, 48, dtype=torch.bool))
    truth.mask[1, 3] = True
    assert precision_of(before, after, truth) == 1


def test_an_embedding_that_is_tied_counts_once(gpt2_like, make_model):
    after = make_model(1, model_name="gpt2-like")
    with torch.no_grad():
        for model in (gpt2_like, after):
            model.unembed.W_U.copy_(model.embed.W_E.T)
        after.blocks[1].mlp.W_out[3] += 1
        after.embed.W_E[5] += 1
        after.unembed.W_U[:, 5] += 1
    truth = NeuronSet(torch.zeros(2, 48, dtype=torch.bool))
    truth.mask[1, 3] = True
    assert precision_of(gpt2_like, after, truth) == pytest.approx(1 / 2)
    with torch.no_grad():
        after.unembed.W_U[:, 6] += 1  # not what the embedding did
    assert precision_of(gpt2_like, after, truth) == pytest.approx(1 / 4)


@pytest.mark.parametrize("kind", ["gpt2", "neox"])
def test_a_matrix_of_q_k_and_v_counts_once(kind):
    """A TransformerBridge has them beside it."""
    before, after = (tiny_bridge(1, KINDS[kind]) for _ in range(2))
    view = NeuronView(after)
    weights = dict(after.named_parameters())
    moved = [name for name in weights if re.search(r"\.(q|k|v|qkv)\.", name)]
    with torch.no_grad():
        for name in moved:
            weights[name] += 0.5
        view.flat_rows(1)[3] += 1
    truth = NeuronSet(torch.zeros(view.size, dtype=torch.bool))
    truth.mask[1, 3] = True
    inside = view.flat_rows(1).shape[1]
    outside = sum(weights[name].numel() / 4 for name in moved if ".qkv." not in name)
    assert len(moved) == 4 * 2 * view.size[0]  # with biases
    assert precision_of(before, after, truth) == pytest.approx(inside / (inside + outside))


@pytest.mark.parametrize("name", ["Phi-3", "GLM"])
def test_a_matrix_of_gate_and_input_counts_once(name):
    """A TransformerBridge has them beside it."""
    before, after = (random_model(config_of(name), 1, 0.15) for _ in range(2))
    with torch.no_grad():
        for weight in after.parameters():
            weight += 1
    total = sum(weight.numel() for weight in after.parameters())
    view = NeuronView(as_bridge(after, name))
    rows = sum(view.flat_rows(layer).numel() for layer in range(view.n_layers))
    truth = NeuronSet(torch.ones(view.size, dtype=torch.bool))
    found = precision_of(as_bridge(before, name), view.model, truth)
    assert found == pytest.approx(rows / total, rel=1e-3)


# ---- the folder


def test_the_folder_is_the_edited_model_for_transformers_and_can_be_undone(
    model, trained_dir, texts, how, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    erasure = erase(model, texts[0], share=0.3, learning_rate=0.02, **how)
    erasure.save(tmp_path / "edited")
    edited = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")
    original = AutoModelForCausalLM.from_pretrained(trained_dir)
    rows = erasure.neurons.mask[1].nonzero().flatten()
    for name, weight in original.state_dict().items():
        now = edited.state_dict()[name]
        if name == "transformer.h.1.mlp.c_proj.weight":
            assert torch.equal(now[rows], erasure.edit.rows)
            now[rows] = weight[rows]
        assert torch.equal(now, weight), name
    with torch.no_grad(), erasure.applied(model):
        tokens = texts[0].tokens[None]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")
        torch.testing.assert_close(loaded(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "edited")("ab")["input_ids"]
    again = load_model(tmp_path / "edited", "cpu")
    assert accuracy(again, texts[0]) <= 0.3
    with RowEdit.load(tmp_path / "edited" / "erased.safetensors").undone(again):
        assert accuracy(again, texts[0]) == 1
    record = json.loads((tmp_path / "edited" / "erased.json").read_text())
    assert record["settings"]["edit"] == "rows"
    assert record["rows"] == [list(pair) for pair in erasure.neurons]
    made_with = record["made_with"]
    assert made_with["fingerprint"] == fingerprint(model)
    assert made_with["environment"]["torch"] == torch.__version__
    watched, measured = made_with["others_watched"], made_with["others_measured"]
    assert len(watched + measured) == record["settings"]["others"]
    assert not {*watched} & {*measured}
    card = (tmp_path / "edited" / "erased.md").read_text()
    assert "12 rows of W_out in layers 1 to 1" in card and "recited, teacher-forced" in card


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_full_disk_leaves_nothing(brief, tmp_path, monkeypatch, error):
    from transformers import GPT2LMHeadModel

    def full(self, folder):
        folder.mkdir()
        (folder / "part").write_text("half")
        raise error

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        brief.save(tmp_path / "edited")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["current", "link", "mount"])
def test_an_empty_folder_is_filled(brief, tmp_path, monkeypatch, form):
    """Nothing of it is removed: it may be the current one, or have a file system of its own."""
    place = tmp_path / "empty"
    place.mkdir()
    monkeypatch.chdir(place)
    folder = tmp_path / "link" if form == "link" else Path("." if form == "current" else place)
    if form == "link":
        folder.symlink_to(place)
    moved = []

    def move(source, target):
        if Path(target).parent == place:
            moved.append(Path(target).name)
            assert Path(source).parent.parent == place  # in one file system
        return Path(source).rename(target)

    monkeypatch.setattr("tl_localize.erasure.directory.os.replace", move)
    brief.save(folder)
    assert moved[-1] == "config.json" and {path.name for path in place.iterdir()} == {*moved}
    assert load_model(place, "cpu").cfg.n_layers == 2


def test_what_is_there_is_not_replaced(brief, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="folder must be new or empty"):
        brief.save(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"


def test_others_that_the_model_does_not_recite_watch_nothing(model, texts, how):
    unknown = [replace(text, tokens=text.tokens.flip(0)) for text in texts[1:3]]
    with pytest.raises(ValueError, match=r"recites at 0.7 .* got 1 of 3\. Give such texts"):
        erase(model, texts[0], max_steps=2, **how | {"others": [texts[1], *unknown]})
    given = how | {"others": [texts[1], *unknown, texts[2]]}
    assert erase(model, texts[0], max_steps=2, **given).settings["others"] == 2
    assert erase(model, texts[0], max_steps=2, check=False, **given).settings["others"] == 4


def test_old_rows_go_into_the_edited_model_alone(model, texts, how):
    edit = erase(model, texts[0], max_steps=2, learning_rate=0.1, **how).edit
    with pytest.raises(ValueError, match="model must hold the rows of the edit, got others in"):
        edit.undone(model).__enter__()
    with edit.applied(model), edit.undone(model):
        assert accuracy(model, texts[0]) == 1
    half = replace(edit, rows=edit.rows.bfloat16().float())  # as a model in half precision has them
    with half.applied(model), edit.undone(model):
        assert accuracy(model, texts[0]) == 1


def test_seven_right_tokens_of_ten_are_recited(model, texts, how, monkeypatch):
    """In float32 their share is below 0.7."""
    share = torch.tensor(0.7)
    assert share.item() < MIN_ACCURACY
    module = import_module("tl_localize.erasure.erase")  # not the function of this name
    monkeypatch.setattr(module, "accuracy", lambda model, some: share.expand(len(some)))
    given = how | {"others": texts[1:4]}
    assert erase(model, texts[0], max_steps=2, **given).settings["others"] == 3


def test_a_source_of_other_weights_is_refused(brief, tmp_path):
    with pytest.raises(ValueError, match="source must hold the rows of W_out of layer 1 once"):
        brief.save(tmp_path / "edited", source="reference-gpt2")
    with pytest.raises(ValueError, match="source must be given"):
        replace(brief, source=None).save(tmp_path / "edited")


def test_an_edit_is_saved_from_another_folder_than_it_was_made_in(
    trained_dir, texts, how, tmp_path, monkeypatch
):
    monkeypatch.chdir(trained_dir.parent)
    erasure = erase(load_model(trained_dir.name, "cpu"), texts[0], max_steps=2, check=False, **how)
    monkeypatch.chdir(tmp_path)
    erasure.save("edited")
    assert (tmp_path / "edited" / "erased.md").is_file()


def test_others_that_are_no_texts_are_named(model, texts, how):
    with pytest.raises(TypeError, match="sequence must be a MemorizedSequence, got int"):
        erase(model, texts[0], **how | {"others": 5})


def test_a_model_that_was_changed_since_it_was_loaded_is_not_saved_as_its_source(
    trained_dir, texts, how, tmp_path
):
    model = load_model(trained_dir, "cpu")
    with torch.no_grad():
        model.blocks[0].attn.W_O[0] += 0.01
    changed = erase(model, texts[0], max_steps=2, check=False, **how)
    with pytest.raises(ValueError, match="or whose weights were changed since, got None"):
        changed.save(tmp_path / "edited")
    with torch.no_grad():
        model.blocks[0].attn.W_O.copy_(load_model(trained_dir, "cpu").blocks[0].attn.W_O)
    first = erase(model, texts[0], max_steps=2, check=False, **how)
    first.save(tmp_path / "edited")
    with first.applied(model):
        second = erase(model, texts[1], max_steps=2, check=False, **how | {"others": texts[2:]})
    with pytest.raises(ValueError, match="or whose weights were changed since, got None"):
        second.save(tmp_path / "again")


@pytest.mark.parametrize(
    "change", [lambda weight: weight.mul_(-1), lambda weight: weight[:2].copy_(weight[:2].flip(0))]
)
def test_signs_and_places_of_weights_count_too(trained_dir, change):
    model = load_model(trained_dir, "cpu")
    assert is_as_loaded(model)
    with torch.no_grad():
        change(model.blocks[0].attn.W_V)
    assert not is_as_loaded(model)


def test_the_least_share_that_is_named_is_one(model, texts):
    def refused(share):
        with pytest.raises(ValueError, match="share must select 1 to") as error:
            erase(model, texts[0], share=share, check=False)
        return float(re.findall(r"The least share is ([\d.]*\d)", str(error.value))[0])

    least = refused(1e-6)
    n = model.cfg.d_mlp
    assert round(n * least) == 1 and round(n * (least - 0.001)) == 0


def test_an_edit_of_an_edit_knows_the_first_model(brief, model, texts, how, trained_dir, tmp_path):
    assert brief.made_with["origin"] == str(trained_dir)
    shipped = replace(brief, made_with=brief.made_with | {"origin": "reference"})
    shipped.save(tmp_path / "edited")
    edited = load_model(tmp_path / "edited", "cpu")
    again = erase(edited, texts[1], max_steps=2, check=False, **how | {"others": texts[2:]})
    again.save(tmp_path / "again")
    assert origin_of(tmp_path / "again") == "reference"
    assert first_example(tmp_path / "again") == first_example("reference")


# ---- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"edit": "retrain"}, "edit must be"),
        ({"share": 0}, "share must be a fraction"),
        ({"max_recited": 2}, "max_recited must be"),
        ({"max_others_lost": -1}, "max_others_lost must be"),
        ({"method": lambda model, text: None}, "settings must be plain values or dataclasses"),
        ({"others": []}, "others must be at least 2 texts that .* share no .* got 0 of 0"),
        ({"general_tokens": torch.ones(1, 4).long()}, "general_tokens must have at least 2 rows"),
        ({"max_steps": 0}, "max_steps must be"),
    ],
)
def test_erase_refuses(model, texts, how, given, message):
    with pytest.raises(ValueError, match=message):
        erase(model, texts[0], **how | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "attribution"}, "an object that scores .* got 'attribution'"),
        ({"method": Attribution}, "an object that scores"),
        ({"others": ["a text"]}, "sequence must be a MemorizedSequence, got str"),
    ],
)
def test_erase_names_what_is_no_method_or_no_text(model, texts, how, given, message):
    with pytest.raises(TypeError, match=message):
        erase(model, texts[0], **how | given)


def test_a_single_other_text_is_too_few(model, texts, how):
    with pytest.raises(ValueError, match=r"others must be at least 2 texts .* got 1 of 1"):
        erase(model, texts[0], **how | {"others": texts[1]})


def test_a_part_of_the_text_is_no_other_text(model, texts, how):
    part = replace(texts[0], tokens=texts[0].tokens[1:], n_prefix=2)
    with pytest.raises(ValueError, match=r"others must be at least 2 texts .* got 1 of 2"):
        erase(model, texts[0], **how | {"others": [part, texts[1]]})


def test_a_share_of_no_head_is_refused_before_anything_is_scored(model, texts, how, monkeypatch):
    heads = Attribution(units=AttentionHeads())
    monkeypatch.setattr(Attribution, "map", lambda *_, **__: pytest.fail("it was scored"))
    with pytest.raises(ValueError, match=r"share must select 1 to \d heads of a layer, got 0\.02"):
        erase(model, texts[0], **how | {"method": heads})


def test_a_text_that_is_not_recited_is_refused_unless_it_is_meant(model, sequence, how):
    with pytest.raises(ValueError, match="sequence must be recited by the model"):
        erase(model, sequence, **how)
    erase(model, sequence, check=False, max_steps=2, **how)


def test_a_model_in_half_precision_is_edited_and_written(trained_dir, texts, how, tmp_path):
    model = load_model(trained_dir, "cpu", torch.bfloat16)
    erasure = erase(model, texts[0], share=0.3, learning_rate=0.02, **how)
    erasure.save(tmp_path / "edited")
    edited, source = load_model(tmp_path / "edited", "cpu"), load_model(trained_dir, "cpu")
    with erasure.edit.applied(source):
        for name, weight in source.state_dict().items():
            assert torch.equal(edited.state_dict()[name], weight), name
    assert accuracy(edited, texts[0]) <= 0.3
    with RowEdit.load(tmp_path / "edited" / "erased.safetensors").undone(edited):
        whole = load_model(trained_dir, "cpu").state_dict()
        for name, weight in edited.state_dict().items():
            assert torch.equal(weight, whole[name]), name


def test_rows_of_heads_are_edited_but_not_written(model, texts, how, tmp_path):
    how = how | {"method": Attribution(units=AttentionHeads())}
    erasure = erase(model, texts[0], share=0.5, max_steps=2, **how)
    assert len(erasure.edit.rows) == 8  # one head of two, of 8 entries
    assert "8 rows" in repr(erasure)
    with pytest.raises(ValueError, match="edit MLP neurons"):
        erasure.save(tmp_path / "edited")


def test_a_price_keeps_both_bounds():
    limit = Price(1, 5)
    assert Price(1, 5).within(limit)
    assert not Price(1.1, 0).within(limit) and not Price(0, 5.1).within(limit)
    for lost in range(1, 101):
        was, now = lost / 100, (lost - 1) / 100  # one point, in the numbers of a machine
        assert Price(100 * (was - now), 0).within(limit)


def test_three_right_tokens_of_ten_are_thirty_percent(model, texts, monkeypatch):
    ten = torch.tensor([1.0] * 3 + [0.0] * 7).mean()
    monkeypatch.setattr(measures, "accuracy", lambda model, texts: ten.expand(len(texts)))
    assert measures.mean_accuracy(model, texts) == 0.3
    assert measure_texts(model, texts)["accuracy"].eq(0.3).all()


def test_fewer_rows_are_trained_faster_unless_a_rate_is_given(model, texts, how):
    for share in (0.1, 0.4):
        settings = erase(model, texts[0], share=share, max_steps=1, **how).settings
        assert settings["learning_rate"] == pytest.approx(0.001 * (0.002 / share) ** 0.6)


def test_a_training_that_passes_its_price_at_once_begins_again_in_smaller_steps(
    model, texts, how, monkeypatch
):
    module = import_module("tl_localize.erasure.erase")  # not the function of this name
    monkeypatch.setattr(module, "SMALLER_RATES", (100, 25, 1))
    how = how | {"share": 0.4, "max_recited": 0, "max_steps": 12, "max_perplexity_rise": 3}
    said = []
    found = erase(model, texts[0], **how, progress=lambda done, text: said.append(text))
    default = 0.001 * 0.005**0.6
    assert found.settings["learning_rate"] == pytest.approx(default)
    assert found.settings["steps"] >= 8 and found.within_price
    again = [text for text in said if text.startswith("the price was passed")]
    assert [float(text.split()[-1]) for text in again] == pytest.approx(
        [25 * default, default], rel=0.1
    )
    asked = erase(model, texts[0], **how, learning_rate=default)
    assert torch.equal(asked.edit.rows, found.edit.rows)
    large = erase(model, texts[0], **how, learning_rate=100 * default)
    assert large.settings["learning_rate"] == 100 * default  # as it is asked for
    assert large.settings["steps"] < 8


def test_an_erased_text_or_a_part_of_it_is_no_other_text_though_it_is_recited(model, texts, how):
    part = replace(texts[0], tokens=texts[0].tokens[1:], n_prefix=2)
    for own, check in ((texts[0], True), (part, False)):
        with pytest.raises(ValueError, match=r"others must be at least 2 texts .* got 1 of 2"):
            erase(model, texts[0], check=check, **how | {"others": [own, texts[1]]})


def test_forty_of_the_known_texts_are_drawn_by_the_seed(model, texts, monkeypatch):
    module = import_module("tl_localize.erasure.erase")  # not the function of this name
    tokens = torch.randint(1, 256, (50, 16), generator=torch.Generator().manual_seed(5))
    known = [replace(texts[0], tokens=row, id=f"k{i}") for i, row in enumerate(tokens)]
    found = SimpleNamespace(sequences=[texts[0], *known])
    monkeypatch.setattr(module, "known", lambda model: found)
    first, again, other = (
        [text.id for text in module.choose_others(model, texts[:1], None, seed, True)]
        for seed in (0, 0, 1)
    )
    assert len(set(first)) == 40 and texts[0].id not in first
    assert first == again and first != other


def test_general_text_is_32_rows_of_64_held_out_tokens_by_default(model):
    module = import_module("tl_localize.erasure.erase")  # not the function of this name
    assert torch.equal(module.choose_general(model, None), held_out_tokens(model)[:32, :64])


def test_kl_is_that_of_the_edit_on_text_that_the_search_did_not_see(model, general, of_four_steps):
    erasure = of_four_steps
    unseen = kl_of_edit(model, lambda: erasure.applied(model), general[1::2])
    assert erasure.measured["after"]["kl"] == unseen > 0
    assert erasure.measured["before"]["kl"] == 0


def test_half_of_a_prefix_keeps_its_beginning_of_text_token(model, texts):
    found = measure_texts(model, [replace(text, bos="<s>") for text in texts])
    for text, row in zip(texts, found.to_dict("records"), strict=True):
        tokens = torch.cat([text.prefix[:1], text.prefix[2:]])[None]  # and half of three words
        for _ in text.suffix:
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        right = (tokens[0, 3:] == text.suffix).int()
        assert row["half_extracted"] == pytest.approx(float(right.cumprod(0).sum() / len(right)))
    assert not found["half_extracted"].equals(measure_texts(model, texts)["half_extracted"])


def test_the_table_of_an_erasure_is_what_was_measured_in_percent(model, texts, how):
    erasure = erase(model, texts[:2], share=0.3, max_steps=4, **how)
    table = erasure.table()
    for when in ("before", "after"):
        frame, other = erasure.texts[when], erasure.measured[when]
        shares = ["accuracy", "extracted", "exact", "half_extracted", "half_exact"]
        wanted = [100 * frame[name].mean() for name in shares] + [frame["distance"].mean()]
        wanted += [100 * other["others_accuracy"], other["perplexity"], other["kl"]]
        assert table[when].tolist() == pytest.approx(wanted)
    assert table["before"].to_dict()["other known texts recited (%)"] == pytest.approx(100)
    assert len(set(table.loc["perplexity of general text"])) == 2


def test_a_price_is_kept_where_that_of_the_watched_texts_is(brief):
    """Whatever the texts cost that the search did not see."""
    asked = brief.settings | {"max_others_lost": 1, "max_perplexity_rise": 5}
    dear = brief.measured["after"] | {"perplexity": 1e9}
    found = replace(brief, settings=asked, measured=brief.measured | {"after": dear})
    assert not found.price.within(Price(1, 5))
    assert replace(found, watched=Price(1, 5)).within_price
    assert not replace(found, watched=Price(1.1, 5)).within_price


def test_a_source_that_holds_the_rows_twice_is_refused(brief, trained_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    twice = AutoModelForCausalLM.from_pretrained(trained_dir)
    first, second = (twice.get_parameter(f"transformer.h.{i}.mlp.c_proj.weight") for i in (0, 1))
    first.data.copy_(second.data)
    twice.save_pretrained(tmp_path / "twice")
    with pytest.raises(ValueError, match="W_out of layer 1 once, got 2 weights that hold them"):
        brief.save(tmp_path / "edited", source=tmp_path / "twice")
    assert not (tmp_path / "edited").exists()


def test_rows_that_differ_by_more_than_a_rounding_are_not_those_of_the_edit(model, brief):
    edit = brief.edit
    for factor, is_there in ((1.001, True), (1.02, False)):
        near = replace(edit, rows=factor * edit.old_rows)
        assert near._is_in(NeuronView(model)) == is_there


def test_the_record_names_the_texts_that_were_watched_and_those_that_were_measured(texts, brief):
    made_with = brief.made_with
    ids = [text.id for text in texts[1:]]
    assert (made_with["others_watched"], made_with["others_measured"]) == (ids[::2], ids[1::2])


def test_what_is_written_is_decoded_with_its_prefix(model, texts, monkeypatch):
    """Some tokens are a part of a character."""
    monkeypatch.setattr(measures, "decoder_or_ids", lambda model: lambda ids: [sum(ids)])
    monkeypatch.setattr(measures, "Levenshtein", SimpleNamespace(distance=lambda *texts: texts))
    found = measures.extract(model, texts[0].prefix, texts[0].suffix)["distance"]
    assert found == ([int(texts[0].tokens.sum())],) * 2


def test_several_texts_are_ablated_by_the_mean_of_their_scores(model, texts, how, monkeypatch):
    module = import_module("tl_localize.erasure.erase")  # not the function of this name
    find, given = module.find_smallest, []

    def spy(trial, scores, report):
        given.append(scores)
        return find(trial, scores, report)

    monkeypatch.setattr(module, "find_smallest", spy)
    erase(model, texts[:2], edit="ablate", **how)
    each = [Attribution()(model, text).values for text in texts[:2]]
    torch.testing.assert_close(given[0].values, (each[0] + each[1]) / 2)


@pytest.mark.parametrize(
    ("edit", "training"), [("rows", {"share": 0.3, "max_steps": 2}), ("ablate", {})]
)
def test_a_first_layer_of_the_method_is_that_of_the_edit(model, texts, how, edit, training):
    method = IterativeAttribution(first_layer=0, share=0.5, rounds=2)
    erasure = erase(model, texts[0], edit=edit, **training, **how | {"method": method})
    assert erasure.neurons.mask.any(1).all()


def test_a_source_of_weights_that_are_only_near_is_refused(brief, trained_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    near = AutoModelForCausalLM.from_pretrained(trained_dir)
    near.transformer.h[1].mlp.c_proj.weight.data.mul_(1.001)
    near.save_pretrained(tmp_path / "near")
    with pytest.raises(ValueError, match="W_out of layer 1 once, got 0 weights that hold them"):
        brief.save(tmp_path / "edited", source=tmp_path / "near")


def test_another_seed_holds_other_general_text(model, texts, how, of_four_steps):
    some, other = of_four_steps, erase(model, texts[0], share=0.3, max_steps=4, seed=1, **how)
    assert some.neurons == other.neurons and not torch.equal(some.edit.rows, other.edit.rows)


def test_a_text_counts_as_recited_from_seven_tenths_on(model, texts, how):
    for n_wrong, error in (
        (3, ""),
        (4, "sequence must be recited by the model with an accuracy of at least 0.7"),
    ):
        tokens = texts[0].tokens.clone()
        tokens[-n_wrong:] = (tokens[-n_wrong:] + 1) % 256
        text = replace(texts[0], tokens=tokens)
        assert accuracy(model, text) == pytest.approx(1 - n_wrong / 12)
        with pytest.raises(ValueError, match=error) if error else nullcontext():
            erase(model, text, max_steps=2, **how)
