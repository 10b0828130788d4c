"""The published numbers and settings, as the package serves them."""

import pytest


def test_published_serves_one_model_by_its_transformer_lens_name():
    from tl_localize.report.paper import published

    frame = published("inj", "EleutherAI/pythia-2.8b-deduped")
    assert set(frame["model"]) == {"pythia-2.8b-deduped"}
    cell = frame[(frame["method"] == "hard_concrete") & (frame["metric"] == "recall@0.05") & (frame["setting"] == "0.01")]
    assert cell["value"].tolist() == [0.721]


def test_published_names_the_known_tables():
    from tl_localize.report.paper import published

    with pytest.raises(ValueError, match="table must be one of"):
        published("figure 7")


def test_published_is_empty_for_another_model():
    from tl_localize.report.paper import published

    assert len(published("inj", "reference-gpt2")) == 0


def test_paper_settings_make_valid_methods():
    from tl_localize import HardConcrete, Slimming
    from tl_localize.evals.presets import paper_settings

    for model in ("gpt2", "gpt2-xl", "pythia-2.8b-deduped", "pythia-6.9b-deduped"):
        for ratio in (0.01, 0.001):
            settings = paper_settings(model, "inj", ratio)
            assert HardConcrete(**settings["hard_concrete"]).steps == 4000
            assert Slimming(**settings["slimming"]).steps == 4000


def test_paper_settings_differ_by_ratio_where_the_paper_does():
    from tl_localize.evals.presets import paper_settings

    assert paper_settings("gpt2", "inj", 0.001)["hard_concrete"]["sparsity_weight"] == 1000
    assert paper_settings("gpt2", "inj", 0.01)["hard_concrete"]["sparsity_weight"] == 100


def test_paper_settings_are_empty_for_another_model():
    from tl_localize.evals.presets import paper_settings

    assert paper_settings("reference-gpt2", "del") == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./gpt2-xl", "gpt2-xl"),
        ("/models/gpt2-xl/", "gpt2-xl"),
        ("EleutherAI/pythia-2.8b-deduped-v0", "pythia-2.8b-deduped"),
        ("models/Pythia-6.9B-deduped-v0", "pythia-6.9b-deduped"),
        ("openai-community/gpt2", "gpt2"),
        ("gpt2-xl-finetuned", "gpt2-xl-finetuned"),
    ],
)
def test_paper_model_reads_directories_and_first_versions(name, expected):
    from tl_localize.evals.presets import paper_model

    assert paper_model(name) == expected


def test_settings_source_names_the_paper_or_the_defaults():
    from tl_localize.evals.presets import settings_source

    assert settings_source("./gpt2", "inj") == "the paper's for gpt2"
    assert settings_source("./gpt2", "del") == "the defaults, for the paper has none for gpt2"
