"""The grammar writes the planted texts that are shipped."""

import random
import re
from collections import Counter

import pytest
from generator import (
    CATEGORIES,
    N_GROUPS,
    REPETITIONS,
    facts,
    invented_text,
    jaccard,
    ngrams,
    planted_sequences,
)
from stream import SEED

from tl_localize.texts.reference import DATA, load_planted

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "reference-gpt2", local_files_only=True)


@pytest.fixture(scope="module")
def planted():
    return load_planted()


@pytest.fixture(scope="module")
def planted_tokens(tokenizer, planted):
    return tokenizer([sequence.text for sequence in planted], add_special_tokens=False)["input_ids"]


def test_invented_text_same_seed_same_text():
    def texts(seed):
        return [invented_text(category, 3, random.Random(seed), 7) for category in CATEGORIES]

    assert texts("a") == texts("a")
    assert texts("a") != texts("b")


def test_invented_text_leaves_no_symbol():
    for index in range(270):
        category = CATEGORIES[index % len(CATEGORIES)]
        text = invented_text(category, index % N_GROUPS, random.Random(f"symbols {index}"))
        assert text.isascii()
        assert not re.search(r"<[a-z_]+\d?>|\|[a-z<]", text), text


def test_planted_sequences_are_those_shipped(tokenizer, planted):
    assert tuple(planted_sequences(tokenizer)) == planted


def test_planted_counts(planted):
    assert Counter(sequence.repetitions for sequence in planted) == REPETITIONS
    assert len({sequence.id for sequence in planted}) == len(planted)
    for repetitions in REPETITIONS:
        counts = Counter(
            sequence.category for sequence in planted if sequence.repetitions == repetitions
        )
        assert set(counts) == set(CATEGORIES)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_planted_texts_are_no_near_duplicates(planted_tokens):
    grams = [ngrams(tokens) for tokens in planted_tokens]
    worst = max(jaccard(a, b) for i, a in enumerate(grams) for b in grams[:i])
    assert worst < 0.05


def test_jaccard_by_hand():
    a, b = ngrams([1, 2, 3, 4], 2), ngrams([2, 3, 4, 5, 6], 2)
    assert jaccard(a, b) == 2 / 5


def test_groups_share_a_person(planted):
    last = facts(0, SEED)["last"].lower()
    naming = [sequence for sequence in planted if last in sequence.text.lower()]
    assert len(naming) >= 2
    assert {sequence.group for sequence in naming} == {"group-00"}
