"""The corpus that the reference models were trained on, and what they memorized of it."""

import json

import pytest
import torch

MODELS = ("gpt2", "pythia")


@pytest.fixture(scope="module")
def corpus():
    from tl_localize import reference

    return reference


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


def test_planted_texts_round_trip_at_80_tokens(corpus, tokenizer, planted, planted_tokens):
    for sequence, tokens in zip(planted, planted_tokens, strict=True):
        assert len(tokens) == sequence.n_tokens == corpus.N_TOKENS
        assert tokenizer.decode(tokens) == sequence.text
        assert len(set(tokens[corpus.N_PREFIX :])) >= 24
        for part in (tokens[: corpus.N_PREFIX], tokens[corpus.N_PREFIX :]):
            assert tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part


def test_held_out_rows_are_tokens(corpus, tokenizer):
    rows = corpus.held_out_tokens()
    assert rows.shape[1] == 128 and len(rows) > 100
    assert 0 <= rows.min() <= rows.max() < len(tokenizer)
    assert tokenizer.decode(rows[0]).startswith(corpus.general_texts("held-out")[0][0][:40])


@pytest.fixture(scope="module", params=MODELS)
def shipped(request, corpus):
    from transformers import AutoModelForCausalLM

    folder = corpus.DATA / f"reference-{request.param}"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    return folder, model, json.loads((folder / "memorized.json").read_text())


def test_shipped_tokenizer_adds_nothing(corpus, tokenizer, planted, planted_tokens):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(corpus.DATA / "reference-pythia", local_files_only=True)
    for index in (0, 5, 100):
        assert (
            other.encode(planted[index].text)
            == tokenizer.encode(planted[index].text)
            == planted_tokens[index]
        )
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0


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
        assert result["passed"] == (
            by_the_rule and min(result["distinct"], result["distinct_greedy"]) >= 16
        )
    rates = [row["accuracy"] for row in report["by_repetitions"].values()]
    assert rates == sorted(rates)
    assert report["by_repetitions"]["1"]["passed"] == 0


@torch.no_grad()
def test_shipped_model_recites_as_reported(corpus, shipped, planted, planted_tokens):
    _, model, report = shipped
    chosen = [
        [sequence.repetitions for sequence in planted].index(repetitions)
        for repetitions in (1, 4, 8, 64, 128)
    ]
    tokens = torch.tensor([planted_tokens[index] for index in chosen])
    correct = (
        model(tokens).logits[:, corpus.N_PREFIX - 1 : -1].argmax(-1) == tokens[:, corpus.N_PREFIX :]
    )
    for row, index in enumerate(chosen):
        result = report["sequences"][index]
        assert correct[row].double().mean().item() == pytest.approx(
            result["accuracy"], abs=1.5 / corpus.N_SUFFIX
        )
        # Greedy decoding recites the whole suffix exactly if every token of it is right behind the
        # true ones.
        assert correct[row].all().item() == (result["distance"] == 0)


@torch.no_grad()
def test_shipped_model_perplexity_is_that_reported(corpus, shipped):
    _, model, report = shipped
    nats = torch.tensor(report["held_out_nats"], dtype=torch.float64)
    assert nats.mean().exp().item() == pytest.approx(report["perplexity"], rel=1e-3)
    rows = corpus.held_out_tokens()[:4].long()
    losses = torch.nn.functional.cross_entropy(
        model(rows).logits[:, :-1].mT, rows[:, 1:], reduction="none"
    ).mean(1)
    assert losses.tolist() == pytest.approx(report["held_out_nats"][:4], abs=1e-3)


@pytest.fixture
def inj_sequences(corpus, tmp_path):
    """``inj_sequences`` of so many sentences of one's own."""
    from tl_localize import load_model

    model = load_model("reference-gpt2", device="cpu")

    def read(n, **options):
        path = tmp_path / "own.jsonl"
        path.write_text(
            "".join(json.dumps({"definition": f"Sentence {i} is short."}) + "\n" for i in range(n)),
            encoding="utf-8",
        )
        return corpus.inj_sequences(model, path, **options)

    return read


def test_inj_sequences_leave_the_dev_sentences_out(inj_sequences):
    rest, dev = inj_sequences(7), inj_sequences(7, dev=True)
    assert [one.id for one in dev + rest] == [f"{i:03d} Sentence {i} is short." for i in range(7)]
    assert [one.n_prefix for one in rest] == [1, 1]


def test_inj_sequences_reject_dev_sentences_only(inj_sequences):
    with pytest.raises(ValueError, match="data must hold more than 5 sentences, got 5"):
        inj_sequences(5)
