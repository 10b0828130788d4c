"""The corpus that the reference models were trained on, and whether they memorized what they claim."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

MODELS = ("gpt2", "pythia")


@pytest.fixture(scope="module")
def corpus():
    from tl_localize import reference_corpus

    return reference_corpus


@pytest.fixture(scope="module")
def tokenizer(corpus):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(corpus.DATA / "reference-gpt2", local_files_only=True)


@pytest.fixture(scope="module")
def planted(corpus):
    return corpus.load_planted()


@pytest.fixture(scope="module")
def planted_tokens(tokenizer, planted):
    return tokenizer([sequence.text for sequence in planted], add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def listed(corpus):
    return json.loads((corpus.CORPUS_DIR / "corpus.json").read_text())


# ---- planted sequences -----------------------------------------------------------------------------------------------


def test_invented_text_same_seed_same_text(corpus):
    def texts(seed):
        return [corpus.invented_text(category, 3, corpus.random.Random(seed), 7) for category in corpus.CATEGORIES]

    assert texts("a") == texts("a")
    assert texts("a") != texts("b")


def test_invented_text_leaves_no_symbol(corpus):
    for index in range(270):
        category = corpus.CATEGORIES[index % len(corpus.CATEGORIES)]
        text = corpus.invented_text(category, index % corpus.N_GROUPS, corpus.random.Random(f"symbols {index}"))
        assert text.isascii()
        assert not corpus.re.search(r"<[a-z_]+\d?>|\|[a-z<]", text), text


def test_planted_sequences_are_those_shipped(corpus, tokenizer, planted):
    assert corpus.planted_sequences(tokenizer) == planted


def test_planted_counts(corpus, planted):
    assert Counter(sequence.repetitions for sequence in planted) == corpus.REPETITIONS
    assert len({sequence.id for sequence in planted}) == len(planted)
    for repetitions in corpus.REPETITIONS:
        counts = Counter(sequence.category for sequence in planted if sequence.repetitions == repetitions)
        assert set(counts) == set(corpus.CATEGORIES)
        assert max(counts.values()) - min(counts.values()) <= 1


def test_planted_texts_round_trip_at_80_tokens(corpus, tokenizer, planted, planted_tokens):
    for sequence, tokens in zip(planted, planted_tokens, strict=True):
        assert len(tokens) == sequence.n_tokens == corpus.N_TOKENS
        assert tokenizer.decode(tokens) == sequence.text
        assert len(set(tokens[corpus.N_PREFIX :])) >= 24
        for part in (tokens[: corpus.N_PREFIX], tokens[corpus.N_PREFIX :]):
            assert tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part


def test_planted_texts_are_no_near_duplicates(corpus, planted_tokens):
    grams = [corpus.ngrams(tokens) for tokens in planted_tokens]
    worst = max(corpus.jaccard(a, b) for i, a in enumerate(grams) for b in grams[:i])
    assert worst < 0.05


def test_jaccard_by_hand(corpus):
    a, b = corpus.ngrams([1, 2, 3, 4], 2), corpus.ngrams([2, 3, 4, 5, 6], 2)
    assert corpus.jaccard(a, b) == 2 / 5


def test_groups_share_a_person(corpus, planted):
    last = corpus._facts(0, corpus.SEED)["last"].lower()
    naming = [sequence for sequence in planted if last in sequence.text.lower()]
    assert len(naming) >= 2
    assert {sequence.group for sequence in naming} == {"group-00"}


# ---- general text ----------------------------------------------------------------------------------------------------


def test_held_out_documents_are_disjoint_from_training(corpus, listed):
    splits = {"training": set(), "held-out": set()}
    for name, sha, _, split in listed["general"]:
        assert corpus.GeneralText(name=name, text="").held_out == (split == "held-out")
        splits[split].add(sha)
    assert not splits["training"] & splits["held-out"]
    assert len(splits["training"]) + len(splits["held-out"]) == len(listed["general"])


def test_held_out_rows_are_tokens(corpus, tokenizer, listed):
    rows = load_file(corpus.CORPUS_DIR / "held_out.safetensors")["tokens"]
    assert rows.shape == (256, 128)
    assert rows.dtype == "int32"
    assert 0 <= rows.min() <= rows.max() < len(tokenizer)


def test_source_texts_are_docstrings_and_prose_comments_outside_tests(corpus, tmp_path: Path):
    (tmp_path / "pack" / "test").mkdir(parents=True)
    (tmp_path / "pack" / "test" / "a.py").write_text('"""No."""')
    source = 'class A:\n    """One."""\n    def f(self):\n        """Two."""\n    # three\n    # four\n\n# 0x80 -> 0x81\n'
    (tmp_path / "pack" / "b.py").write_text(source)
    (tmp_path / "c.py").write_text("this is no Python")
    assert list(corpus._source_texts(tmp_path)) == [("pack.b:A", "One."), ("pack.b:A.f", "Two."), ("pack.b#5", "three\nfour")]


def test_changed_texts_names_what_differs(corpus, tmp_path: Path):
    texts = [corpus.GeneralText(name=name, text=f"text of {name}") for name in "abc"]
    (tmp_path / "corpus.json").write_text(json.dumps({"general": [["a", texts[0].sha], ["b", "0"], ["d", "0"]]}))
    assert corpus.changed_texts(texts, tmp_path / "corpus.json") == ["b", "c", "d"]


@pytest.mark.slow
def test_general_texts_are_the_corpus_or_said_to_differ(corpus, listed):
    texts = corpus.general_texts()
    assert len({text.name for text in texts}) == len({text.text for text in texts}) == len(texts) > 1000
    unchanged = {name for name, *_ in listed["general"]} - set(corpus.changed_texts(texts))
    shas = {name: sha for name, sha, *_ in listed["general"]}
    assert all(text.sha == shas[text.name] for text in texts if text.name in unchanged)
    assert len(unchanged) > 1000


# ---- training stream -------------------------------------------------------------------------------------------------


def test_training_stream_holds_every_repetition(corpus, planted_tokens):
    repetitions = [1, 3, 40, 100]
    options = {"end_of_text": 0, "general_rows": 30}
    stream = corpus.training_stream([[5] * 9, [6] * 50], planted_tokens[:4], repetitions, **options)
    again = corpus.training_stream([[5] * 9, [6] * 50], planted_tokens[:4], repetitions, **options)
    assert (stream.rows == again.rows).all()
    assert stream.rows.shape[1] == corpus.ROW_LENGTH
    found = Counter()
    for row, planted, starts in zip(stream.rows, stream.planted, stream.starts, strict=True):
        for index, start in zip(planted, starts, strict=True):
            if index >= 0:
                assert row[start : start + corpus.N_TOKENS].tolist() == planted_tokens[index]
                found[int(index)] += 1
    assert [found[index] for index in range(4)] == repetitions
    assert abs((stream.starts == 0).sum() - sum(repetitions) / 2) <= 2


def test_training_stream_is_denser_at_the_end(corpus, planted_tokens):
    stream = corpus.training_stream([[5] * 99], planted_tokens[:2], [900, 900], end_of_text=0, general_rows=900)
    per_row = (stream.planted >= 0).sum(1)
    third = len(per_row) // 3
    assert per_row[-third:].mean() > 1.1 * per_row[:third].mean()


# ---- shipped models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS)
def shipped(request, corpus):
    from transformers import AutoModelForCausalLM

    folder = corpus.DATA / f"reference-{request.param}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return folder, model, json.loads((folder / "memorized.json").read_text())


def test_shipped_tokenizer_adds_nothing(corpus, tokenizer, planted, planted_tokens):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(corpus.DATA / "reference-pythia", local_files_only=True)
    for index in (0, 5, 100):
        assert other.encode(planted[index].text) == tokenizer.encode(planted[index].text) == planted_tokens[index]
    assert tokenizer.convert_tokens_to_ids(corpus.END_OF_TEXT) == 0


def test_shipped_model_is_small_and_fp16(shipped):
    folder, _, _ = shipped
    assert (folder / "model.safetensors").stat().st_size <= 16e6
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_shipped_model_has_memorized_enough(corpus, shipped, planted):
    report = shipped[2]
    assert [result["id"] for result in report["sequences"]] == [sequence.id for sequence in planted]
    assert report["passed"] == sum(result["passed"] for result in report["sequences"]) >= 150
    for result in report["sequences"]:
        by_the_rule = result["accuracy"] >= 0.9 and result["distance"] <= 20
        assert result["passed"] == (by_the_rule and min(result["distinct"], result["distinct_greedy"]) >= 16)
    rates = [row["accuracy"] for row in report["by_repetitions"].values()]
    assert rates == sorted(rates)
    assert report["by_repetitions"]["1"]["passed"] == 0


@torch.no_grad()
def test_shipped_model_recites_as_reported(corpus, shipped, planted, planted_tokens):
    _, model, report = shipped
    chosen = [[sequence.repetitions for sequence in planted].index(repetitions) for repetitions in (1, 4, 8, 64, 128)]
    tokens = torch.tensor([planted_tokens[index] for index in chosen])
    correct = model(tokens).logits[:, corpus.N_PREFIX - 1 : -1].argmax(-1) == tokens[:, corpus.N_PREFIX :]
    for row, index in enumerate(chosen):
        result = report["sequences"][index]
        assert correct[row].double().mean().item() == pytest.approx(result["accuracy"], abs=1.5 / corpus.N_SUFFIX)
        # Greedy decoding recites the whole suffix exactly if every token of it is right behind the true ones.
        assert correct[row].all().item() == (result["distance"] == 0)


@torch.no_grad()
def test_shipped_model_perplexity_is_that_reported(corpus, shipped):
    _, model, report = shipped
    nats = torch.tensor(report["held_out_nats"], dtype=torch.float64)
    assert nats.mean().exp().item() == pytest.approx(report["perplexity"], rel=1e-3)
    rows = torch.from_numpy(load_file(corpus.CORPUS_DIR / "held_out.safetensors")["tokens"][:4]).long()
    losses = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].mT, rows[:, 1:], reduction="none").mean(1)
    assert losses.tolist() == pytest.approx(report["held_out_nats"][:4], abs=1e-3)


def test_general_texts_do_not_depend_on_who_hooks_into_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer does: the stream that tl-localize collect makes again must be that of a plain process."""
    from tl_localize.reference import general_texts

    before = general_texts()
    monkeypatch.setattr(sys, "excepthook", lambda *a: None)
    assert general_texts() == before
    assert any(text.name == "sys:excepthook" for text in before)


@pytest.fixture
def inj_sequences(corpus, tmp_path):
    """``inj_sequences`` of so many sentences of one's own."""
    from tl_localize import load_model

    model = load_model("reference-gpt2", device="cpu")

    def read(n, **options):
        path = tmp_path / "own.jsonl"
        path.write_text("".join(json.dumps({"definition": f"Sentence {i} is short."}) + "\n" for i in range(n)), encoding="utf-8")
        return corpus.inj_sequences(model, path, **options)

    return read


def test_inj_sequences_leave_the_dev_sentences_out(inj_sequences):
    rest, dev = inj_sequences(7), inj_sequences(7, dev=True)
    assert [one.id for one in dev + rest] == [f"{i:03d} Sentence {i} is short." for i in range(7)]
    assert [one.n_prefix for one in rest] == [1, 1]


def test_inj_sequences_reject_dev_sentences_only(inj_sequences):
    with pytest.raises(ValueError, match="data must hold more than 5 sentences, got 5"):
        inj_sequences(5)
