"""The published numbers, as the package serves them."""

import pytest

from tl_localize.paper import TITLES, published, short_title


def test_published_serves_one_model_by_its_transformer_lens_name():
    frame = published("inj", "EleutherAI/pythia-2.8b-deduped")
    assert set(frame["model"]) == {"pythia-2.8b-deduped"}
    cells = frame.set_index(["method", "metric", "setting"])["value"]
    assert cells.loc[("hard_concrete", "recall@0.05", "0.01")] == 0.721
    assert len(published("inj", "reference-gpt2")) == 0


def test_only_titles_are_shortened():
    assert short_title("row_norm") == short_title(TITLES["row_norm"]) == "RowNorm"
    assert short_title("mine (a)") == "mine (a)"


def test_published_names_the_known_tables():
    with pytest.raises(ValueError, match="table must be one of"):
        published("figure 7")


@pytest.mark.parametrize("table", ["inj", "inj_global", "del", "memorization", "categories"])
def test_texts_of_the_published_tables_are_their_values(table):
    frame = published(table)
    shown = frame["text"].str.split().str[0]
    decimals = shown.str.partition(".")[2].str.len()
    in_percent = frame["metric"].str.contains("recall|accuracy")
    exact = frame["value"].where(~in_percent, 100 * frame["value"])
    assert ((shown.astype(float) - exact).abs() <= 0.5 * 10.0**-decimals + 1e-9).all()
