"""What ``erase`` does with 1, 5 and 20 texts at once, as ``transformers`` sees it.

    python benchmarks/measure_erasures.py reference-gpt2
    python benchmarks/measure_erasures.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/measure_erasures.py SmolLM2-135M-Instruct.Q4_1.gguf --max-others-lost 5

Decided before the first row: the texts are those that the model recites (``known``: at least 70 %
of the suffix) with 16 tokens or more to recite, in random order (seed 0), without the first 20: on
these it was tried how several texts are best erased. Of the others the first 1, 5 and 20 are
erased, with the defaults of ``erase``, and 5 and 20 once more at a price of 5 points. The folder
that is written is read by ``transformers`` alone, and what that model recites is counted by a plain
loop; it must be what ``erase`` has measured.

Each edit has a row in docs/results/erasures.csv as soon as it is done, and one that stands there is
not made again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import pandas as pd
import torch

from tl_localize import MemorizedSequence, erase, load_model
from tl_localize.texts.known import known

FRAME = Path(__file__).parents[1] / "docs/results/erasures.csv"
COUNTS = (1, 5, 20)
N_TRIED = 20  # texts on which the form of the edit was chosen
MIN_SUFFIX = 16


def recited_by(folder: str, sequences: list[MemorizedSequence]) -> float:
    """Mean share of suffix tokens that the model in a folder predicts right, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shares = []
    for sequence in sequences:
        with torch.no_grad():
            logits = model(sequence.tokens[None]).logits[0]
        predicted = logits[sequence.n_prefix - 1 : -1].argmax(-1)
        shares.append((predicted == sequence.tokens[sequence.n_prefix :]).double().mean())
    return float(torch.stack(shares).mean())


def measure(name: str, n_texts: int, max_others_lost: float) -> dict[str, object]:
    """A row: what was erased, and at which price."""
    model = load_model(name, device="cpu")
    found = [text for text in known(model).sequences if len(text.suffix) >= MIN_SUFFIX]
    random.Random(0).shuffle(found)
    texts = found[N_TRIED:][:n_texts]
    erasure = erase(model, texts, max_others_lost=max_others_lost)
    with tempfile.TemporaryDirectory() as folder:
        erasure.save(f"{folder}/edited", force=True)
        by_transformers = recited_by(f"{folder}/edited", texts)
    before, after = erasure.texts["before"], erasure.texts["after"]
    assert abs(by_transformers - after["accuracy"].mean()) < 1e-3
    row: dict[str, object] = {"texts": len(texts), "rows": len(erasure.neurons)}
    for key in ("accuracy", "extracted", "half_extracted"):
        row |= {f"{key}_before": before[key].mean(), f"{key}_after": after[key].mean()}
    row |= {"texts_erased": int((after["accuracy"] <= erasure.settings["max_recited"]).sum())}
    row |= {"accuracy_by_transformers": by_transformers, "within_price": erasure.within_price}
    row |= {"others_lost": erasure.price.others_lost}
    row |= {"perplexity_rise": erasure.price.perplexity_rise}
    return row | {"kl": erasure.measured["after"]["kl"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--max-others-lost", type=float, default=1.0)
    parser.add_argument("--texts", type=int, nargs="*", default=COUNTS)
    asked = parser.parse_args()
    about = {"model": Path(asked.model).stem, "max_others_lost": asked.max_others_lost}
    for n_texts in asked.texts:
        rows = pd.read_csv(FRAME).to_dict("records") if FRAME.is_file() else []
        this = about | {"texts": n_texts}
        if any(all(row[key] == value for key, value in this.items()) for row in rows):
            continue
        row = about | measure(asked.model, n_texts, asked.max_others_lost)
        print(row, flush=True)
        pd.DataFrame([*rows, row]).round(6).to_csv(FRAME, index=False)


if __name__ == "__main__":
    main()
