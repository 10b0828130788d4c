"""What a run has where the user says nothing, and how names become methods, data and benchmarks."""

import pytest
import torch

from tl_localize import HardConcrete, Slimming
from tl_localize.evals.settings import (
    GENERAL,
    collected_text,
    del_data,
    del_methods,
    del_ratios,
    drawn_first,
    inj_ratios,
    make_methods,
    read_general_text,
)
from tl_localize.files import save_tensors
from tl_localize.paper import paper_model, paper_settings, settings_source
from tl_localize.texts.readers import COLLECTED, Data


def test_paper_settings_make_valid_methods():
    for model in ("gpt2", "gpt2-xl", "pythia-2.8b-deduped", "pythia-6.9b-deduped"):
        for ratio in (0.01, 0.001):
            settings = paper_settings(model, "inj", ratio)
            assert HardConcrete(**settings["hard_concrete"]).steps == 4000
            assert Slimming(**settings["slimming"]).steps == 4000


def test_paper_settings_differ_by_ratio_and_are_empty_for_another_model():
    assert paper_settings("gpt2", "inj", 0.001)["hard_concrete"]["sparsity_weight"] == 1000
    assert paper_settings("gpt2", "inj", 0.01)["hard_concrete"]["sparsity_weight"] == 100
    assert paper_settings("reference-gpt2", "del") == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./gpt2-xl", "gpt2-xl"),
        ("/models/gpt2-xl/", "gpt2-xl"),
        ("EleutherAI/pythia-2.8b-deduped-v0", "pythia-2.8b-deduped"),
        ("models/Pythia-6.9B-deduped-v0", "pythia-6.9b-deduped"),
        ("gpt2-xl-finetuned", "gpt2-xl-finetuned"),
    ],
)
def test_paper_model_reads_directories_and_first_versions(name, expected):
    assert paper_model(name) == expected


def test_settings_source_names_the_paper_or_the_defaults():
    assert "the paper's for gpt2" in settings_source("./gpt2", "inj")
    assert "the paper's" not in settings_source("./gpt2", "del")


def test_del_methods_spare_the_first_layer_and_take_the_seed():
    tuned = {"slimming": {"first_layer": 0, "steps": 5}}
    names = "hard_concrete,slimming,random"
    own = ["slimming.steps=7"]
    found = del_methods(names, own, "reference-gpt2", tuned, 3)
    hard, slim, noise = found
    assert (hard.first_layer, slim.first_layer, slim.steps, noise.seed) == (1, 1, 7, 3)
    paper = del_methods("hard_concrete", [], "gpt2-xl")[0]
    assert (paper.steps, paper.sparsity_weight, paper.initial_mask) == (200, 1000.0, 0.9)


def test_settings_are_read_from_text():
    given = ["slimming.learning_rate=.5", "slimming.steps=3", "integrated_gradients.rule=midpoint"]
    slim, gradients = make_methods("slimming, integrated_gradients", given)
    assert slim == Slimming(learning_rate=0.5, steps=3)
    assert getattr(gradients, "rule", "") == "midpoint"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slimming.steps", "--set must read METHOD.SETTING=VALUE"),
        ("activations.steps=3", "of one of slimming, got"),
        ("slimming.step=3", "Did you mean steps"),
        ("slimming.units=heads", "settings of slimming must be one of"),
        ("slimming.steps=many", "steps must be a whole number from 1 on"),
    ],
)
def test_settings_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make_methods("slimming", [text])


def test_ratios_are_the_papers_or_larger_ones_of_the_reference_models():
    assert (inj_ratios("gpt2"), inj_ratios("reference")) == ([0.01, 0.001], [0.03])
    assert (del_ratios("gpt2"), del_ratios("reference-pythia")) == ((0.001, 0.005), (0.02, 0.1))


def test_targets_are_drawn_by_seed_and_dev_sequences_stay_first(make_sequences):
    sequences = make_sequences(*[(4, 2)] * 20)
    drawn = [[sequence.id for sequence in drawn_first(sequences, 5, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][:5] == ["s0", "s1", "s2", "s3", "s4"]
    assert sorted(drawn[0]) == sorted(sequence.id for sequence in sequences)


def test_general_text_is_docstrings_unless_it_is_named(gpt2_like, monkeypatch, tmp_path):
    docstrings = torch.arange(60 * 32).view(60, 32).int() % 61
    monkeypatch.setattr("tl_localize.evals.settings.held_out_tokens", lambda model: docstrings)
    data = Data(source=torch.arange(40).view(4, 10), n_prefix=3)
    own = tmp_path / "general.safetensors"
    save_tensors(own, {"tokens": docstrings[:2]})
    for path, expected in ((None, docstrings[:48]), (own, docstrings[:2])):
        found, n_dev, text = del_data(gpt2_like, data, path, n_dev=1)
        assert len(found) == 4 and n_dev == 1
        assert torch.equal(torch.as_tensor(text), expected)
        assert torch.equal(torch.as_tensor(read_general_text(gpt2_like, path)), expected)


def test_general_text_of_a_collection_lies_in_its_folder(tmp_path):
    assert collected_text(None) is None and collected_text(tmp_path) is None
    (tmp_path / GENERAL).touch()
    assert collected_text(tmp_path) is None
    (tmp_path / COLLECTED).touch()
    assert collected_text(tmp_path) == tmp_path / GENERAL
