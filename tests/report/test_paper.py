"""The published numbers, as the package serves them."""

import pytest

from tl_localize.report.paper import published


def test_published_serves_one_model_by_its_transformer_lens_name() -> None:
    frame = published("inj", "EleutherAI/pythia-2.8b-deduped")
    assert set(frame["model"]) == {"pythia-2.8b-deduped"}
    cells = frame.set_index(["method", "metric", "setting"])["value"]
    assert cells.loc[("hard_concrete", "recall@0.05", "0.01")] == 0.721
    assert len(published("inj", "reference-gpt2")) == 0


def test_published_names_the_known_tables() -> None:
    with pytest.raises(ValueError, match="table must be one of"):
        published("figure 7")
