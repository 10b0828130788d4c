"""The corpus that the reference models were trained on, and what they memorized of it."""

import json

import pytest
import torch

from tl_localize.texts import reference as corpus

MODELS = ("gpt2", "pythia")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(corpus.DATA / "reference-gpt2", local_files_only=True)


PLANTED = corpus.load_planted()


@pytest.fixture(scope="module")
def planted_tokens(tokenizer):
    return tokenizer([sequence.text for sequence in PLANTED], add_special_tokens=False)["input_ids"]


def test_planted_texts_round_trip_at_80_tokens(tokenizer, planted_tokens):
    for sequence, tokens in zip(PLANTED, planted_tokens, strict=True):
        assert len(tokens) == sequence.n_tokens == corpus.N_TOKENS
        assert tokenizer.decode(tokens) == sequence.text
        assert len(set(tokens[corpus.N_PREFIX :])) >= 24
        for part in (tokens[: corpus.N_PREFIX], tokens[corpus.N_PREFIX :]):
            assert tokenizer.encode(tokenizer.decode(part), add_special_tokens=False) == part


def test_held_out_rows_are_tokens(tokenizer):
    rows = corpus.held_out_tokens()
    assert rows.shape[1] == 128 and len(rows) > 100
    assert 0 <= rows.min() <= rows.max() < len(tokenizer)
    assert tokenizer.decode(rows[0]).startswith(corpus.general_texts("held-out")[0][:40])


@pytest.fixture(scope="module", params=MODELS)
def shipped(request):
    from transformers import AutoModelForCausalLM

    folder = corpus.DATA / f"reference-{request.param}"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    return folder, model, json.loads((folder / "memorized.json").read_text())


def test_shipped_tokenizers_are_one_and_add_nothing(tokenizer, planted_tokens):
    other = type(tokenizer).from_pretrained(corpus.DATA / "reference-pythia", local_files_only=True)
    for each in (tokenizer, other):
        assert each.encode(PLANTED[5].text) == planted_tokens[5]
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0


def test_shipped_model_is_small_and_fp16(shipped):
    folder, _, _ = shipped
    assert (folder / "model.safetensors").stat().st_size <= 16e6
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_shipped_model_has_memorized_enough(shipped):
    report = shipped[2]
    assert [result["id"] for result in report["sequences"]] == [text.id for text in PLANTED]
    assert report["passed"] == sum(result["passed"] for result in report["sequences"]) >= 150
    for result in report["sequences"]:
        recited = result["accuracy"] >= 0.9 and result["distance"] <= 20
        distinct = min(result["distinct"], result["distinct_greedy"]) >= 16
        assert result["passed"] == (recited and distinct)
    rates = [row["accuracy"] for row in report["by_repetitions"].values()]
    assert rates == sorted(rates)


@torch.no_grad()
def test_shipped_model_recites_as_reported(shipped, planted_tokens):
    _, model, report = shipped
    repetitions = [sequence.repetitions for sequence in PLANTED]
    chosen = [repetitions.index(n) for n in (1, 4, 8, 64, 128)]
    tokens = torch.tensor([planted_tokens[index] for index in chosen])
    predicted = model(tokens).logits[:, corpus.N_PREFIX - 1 : -1].argmax(-1)
    for right, index in zip(predicted == tokens[:, corpus.N_PREFIX :], chosen, strict=True):
        result = report["sequences"][index]
        share = right.double().mean().item()
        assert share == pytest.approx(result["accuracy"], abs=1.5 / corpus.N_SUFFIX)
        # Greedy decoding recites the whole suffix exactly if every token of it is right behind the
        # true ones.
        assert right.all().item() == (result["distance"] == 0)


@torch.no_grad()
def test_shipped_model_perplexity_is_that_reported(shipped):
    _, model, report = shipped
    nats = torch.tensor(report["held_out_nats"], dtype=torch.float64)
    assert nats.mean().exp().item() == pytest.approx(report["perplexity"], rel=1e-3)
    rows = corpus.held_out_tokens()[:4].long()
    losses = torch.nn.functional.cross_entropy(
        model(rows).logits[:, :-1].mT, rows[:, 1:], reduction="none"
    ).mean(1)
    assert losses.tolist() == pytest.approx(report["held_out_nats"][:4], abs=1e-3)


@pytest.fixture(scope="module")
def own_sentences(tmp_path_factory, shipped_model):
    """``inj_sequences`` of so many sentences of one's own."""
    model = shipped_model()
    path = tmp_path_factory.mktemp("own") / "own.jsonl"

    def read(n, **options):
        rows = [{"definition": f"Sentence {i} is short."} for i in range(n)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return corpus.inj_sequences(model, path, **options)

    return read


def test_inj_sequences_leave_the_dev_sentences_out(own_sentences):
    rest, dev = own_sentences(7), own_sentences(7, dev=True)
    names = [f"{i:03d} Sentence {i} is short." for i in range(7)]
    assert [sentence.id for sentence in dev + rest] == names
    assert [sentence.n_prefix for sentence in rest] == [1, 1]


def test_inj_sequences_keep_the_ids_of_the_data(shipped_model):
    model = shipped_model()
    rows = [{"text": f"Sentence {i} is short.", "id": f"s{i}"} for i in range(7)]
    rows[6].pop("id")
    found = corpus.inj_sequences(model, rows)
    assert [sentence.id for sentence in found] == ["s5", "006 Sentence 6 is short."]


def test_inj_sequences_reject_dev_sentences_only(own_sentences):
    with pytest.raises(ValueError, match="data must hold more than 5 sentences, got 5"):
        own_sentences(5)


def test_planted_sequences_come_in_the_order_of_their_repetitions(shipped_model):
    model = shipped_model()
    found = [text.id for text in corpus.reference_sequences(model)]
    repetitions = {text.id: text.repetitions for text in PLANTED if text.repetitions >= 64}
    seen = [repetitions[id] for id in found]
    assert len(found) == len(repetitions) and seen == sorted(seen, reverse=True)
    assert seen[0] > seen[-1] == 64
