"""The published numbers and settings, as the package serves them."""

import pytest


def test_published_serves_one_model_by_its_transformer_lens_name():
    from tl_localize.report.paper import published

    frame = published("inj", "EleutherAI/pythia-2.8b-deduped")
    assert set(frame["model"]) == {"pythia-2.8b-deduped"}
    cell = frame[
        (frame["method"] == "hard_concrete")
        & (frame["metric"] == "recall@0.05")
        & (frame["setting"] == "0.01")
    ]
    assert cell["value"].tolist() == [0.721]


def test_published_names_the_known_tables():
    from tl_localize.report.paper import published

    with pytest.raises(ValueError, match="table must be one of"):
        published("figure 7")


def test_published_is_empty_for_another_model():
    from tl_localize.report.paper import published

    assert len(published("inj", "reference-gpt2")) == 0
