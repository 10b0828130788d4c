"""The two data files in the wheel: sentences to inject, and the numbers that the paper printed."""

import csv
import json
import math
from collections import Counter
from importlib.resources import files

import pytest

COLUMNS = ["table", "model", "setting", "method", "metric", "value", "standard_error", "note"]
SHOWN = ["row", "column", "text"]  # where a number stands beside our tables
MODELS = {"gpt2", "gpt2-xl", "pythia-2.8b-deduped", "pythia-6.9b-deduped"}
METHODS = {"hard_concrete", "slimming", "zero_out", "integrated_gradients", "activations", "random"}
ROWS_PER_TABLE = {
    "inj": 4 * 2 * 3 * 6 - 6,  # models x ratios x k x methods; the paper has no Zero-Out on 6.9B
    "inj_global": 4 * 2 * 3 * 6 - 6,
    "inj_expanded": 3 * 4,
    "inj_seeds": 3 * 4,
    "inj_pvalues": 4 * 2 * 3 * 2,
    "del": 3 * 2 * 5 * 6 - 10,
    "del_pvalues": 3 * 2 * 2,
    "memorization": 3 * 4,
    "categories": 9,
    "cost": 5,
    "architecture": 4 * 2,
}


def read_data(name):
    return (files("tl_localize") / "data" / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def records():
    return [json.loads(line) for line in read_data("inj_sentences.jsonl").splitlines()]


@pytest.fixture(scope="module")
def sentences(records):
    return [record["definition"] for record in records]


@pytest.fixture(scope="module")
def published():
    return list(csv.DictReader(read_data("published.csv").splitlines()))


def test_inj_sentences_hold_96_definitions(records):
    assert len(records) == 96
    assert all(list(record) == ["definition"] for record in records)


def test_inj_sentences_are_distinct(sentences):
    assert len(set(sentences)) == len(sentences)


def test_inj_sentences_begin_with_different_letters(sentences):
    assert len({sentence.split()[0] for sentence in sentences}) == len(sentences)
    assert len({sentence[:3].lower() for sentence in sentences}) == len(sentences)


def test_inj_sentences_have_the_length_of_a_definition(sentences):
    assert [s for s in sentences if not 12 <= len(s.split()) <= 60] == []


def test_inj_sentences_are_plain_single_line_text(sentences):
    assert [
        s
        for s in sentences
        if not (s.isascii() and s.isprintable() and s == s.strip() and s.endswith("."))
    ] == []


def test_published_has_every_cell_of_each_table(published):
    assert Counter(row["table"] for row in published) == ROWS_PER_TABLE


def test_published_rows_have_all_columns(published):
    assert all(list(row) == COLUMNS + SHOWN and None not in row.values() for row in published)


def test_published_keys_are_unique(published):
    keys = Counter(tuple(row[column] for column in COLUMNS[:5]) for row in published)
    assert [key for key, count in keys.items() if count > 1] == []


def test_published_uses_known_names(published):
    assert {row["model"] for row in published} == MODELS
    assert {row["method"] for row in published} == METHODS | {""}
    assert {row["setting"] for row in published} == {"0.01", "0.001", "0.005", ""}


def test_published_values_are_finite(published):
    assert all(math.isfinite(float(row["value"])) for row in published)


def test_published_recalls_and_p_values_are_fractions(published):
    rows = [row for row in published if row["metric"].startswith(("recall@", "p_value_"))]
    assert len(rows) == 138 + 138 + 12 + 12 + 48 + 12
    assert [row for row in rows if not 0 < float(row["value"]) < 1] == []


def test_published_dropout_only_forgets(published):
    for row in published:
        if row["table"] == "del" and row["metric"].endswith("_accuracy"):
            assert -1 < float(row["value"]) < 0, row
        elif row["table"] == "del":
            assert float(row["value"]) >= 0, row


def test_published_significance_follows_the_bonferroni_level(
    published,
):
    level = {"inj_pvalues": 0.05 / 24, "del_pvalues": 0.05 / 6}
    rows = [row for row in published if row["table"] in level]
    assert [
        r
        for r in rows
        if (float(r["value"]) > level[r["table"]]) != (r["note"] == "not significant")
    ] == []


def test_published_categories_sum_to_the_105_collected_sequences(
    published,
):
    assert sum(int(row["value"]) for row in published if row["table"] == "categories") == 105


@pytest.mark.parametrize(
    ("key", "value", "standard_error"),
    [
        ("inj gpt2 0.01 hard_concrete recall@0.01", 0.495, 0.0048),
        ("inj gpt2-xl 0.001 zero_out recall@0.005", 0.319, 0.0127),
        ("inj pythia-6.9b-deduped 0.001 random recall@0.005", 0.005, 0.0002),
        ("inj_global gpt2 0.001 hard_concrete recall@0.005", 0.964, None),
        ("inj_expanded gpt2 0.001 slimming recall@0.002", 0.843, None),
        ("inj_seeds gpt2 0.001 integrated_gradients recall@0.005", 0.839, None),
        ("inj_pvalues pythia-6.9b-deduped 0.01 hard_concrete p_value_recall@0.05", 3e-155, None),
        ("del gpt2-xl 0.001 hard_concrete delta_self_accuracy", -0.346, None),
        ("del pythia-6.9b-deduped 0.005 random delta_random_perplexity_base2", 0.02, None),
        ("del_pvalues pythia-2.8b-deduped 0.001 slimming p_value_delta_self_accuracy", 0.12, None),
        ("memorization pythia-6.9b-deduped - - suffix_length", 167, None),
        ("categories gpt2-xl - - count_quotes_book", 14, None),
        ("cost pythia-6.9b-deduped - integrated_gradients seconds", 2580, None),
        ("architecture pythia-6.9b-deduped - - neurons", 16384, None),
    ],
)
def test_published_agrees_with_the_paper(published, key, value, standard_error):
    wanted = ["" if part == "-" else part for part in key.split()]
    (row,) = [row for row in published if [row[column] for column in COLUMNS[:5]] == wanted]
    assert float(row["value"]) == value
    assert row["standard_error"] == ("" if standard_error is None else f"{standard_error:.4f}")
