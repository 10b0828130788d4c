"""A tiny model that recites a few texts."""

import pytest
import torch


@pytest.fixture(autouse=True)
def little_general_text_of_others(few_docstrings):
    """General text of a command or an edit that is given none."""


@pytest.fixture(scope="session")
def texts():
    """Random texts that the model has learned."""
    from tl_localize import MemorizedSequence

    tokens = torch.randint(1, 256, (6, 16), generator=torch.Generator().manual_seed(3))
    return [MemorizedSequence(row, 4, f"t{i}") for i, row in enumerate(tokens)]


@pytest.fixture(scope="session")
def trained_dir(model_dir, texts, tmp_path_factory):
    """A folder of a model that recites the texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path_factory.mktemp("erase") / "trained"
    hf_model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokens = torch.stack([text.tokens for text in texts])
    adam = torch.optim.Adam(hf_model.parameters(), lr=0.01)
    for _ in range(80):
        adam.zero_grad()
        hf_model(tokens, labels=tokens).loss.backward()
        adam.step()
    hf_model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(trained_dir):
    from tl_localize import load_model

    return load_model(trained_dir, "cpu")
