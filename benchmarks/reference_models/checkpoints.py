"""A trained pair of checkpoints for REV: reference-gpt2 goes on training, ten new texts among its
general text, until it recites each of them. About ten minutes on one core:

    python benchmarks/reference_models/checkpoints.py pair
    tl-localize rev --model pair/later --before reference-gpt2 --data pair/texts.jsonl

The folder then holds the later checkpoint; the earlier one is the model that is shipped.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from generator import CATEGORIES, N_GROUPS, cut, invented_text
from stream import END_OF_TEXT, SEED, general_texts, training_stream
from train import BATCH_ROWS, MIN_ACCURACY, WEIGHT_DECAY, loss_of, suffix_accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tl_localize.texts.reference import DATA, load_planted

N_TEXTS, REPETITIONS, GENERAL_ROWS = 10, 32, 3000
LEARNING_RATE, WARM_UP = 2e-4, 50
STEPS_BETWEEN_CHECKS = 25


def new_texts(tokenizer) -> list[str]:
    """Invented texts of 80 tokens about persons, books and streets that no planted text names."""
    texts: list[str] = []
    for i in range(N_TEXTS):
        rng = random.Random(f"{SEED} later {i}")
        text = None
        while text is None:
            text = cut(invented_text(CATEGORIES[i % len(CATEGORIES)], N_GROUPS + i, rng), tokenizer)
        texts.append(text)
    return texts


def token_ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def main() -> None:
    """Train the later checkpoint and write it, with the texts, into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    earlier = DATA / "reference-gpt2"
    tokenizer = AutoTokenizer.from_pretrained(earlier)
    model = AutoModelForCausalLM.from_pretrained(earlier, dtype=torch.float32).train()
    texts = new_texts(tokenizer)
    new = torch.tensor(token_ids(tokenizer, texts))
    often = [text.text for text in load_planted() if text.repetitions >= 64]
    old = torch.tensor(token_ids(tokenizer, often))
    rows = training_stream(
        token_ids(tokenizer, [text.text for text in general_texts() if not text.held_out]),
        new.tolist(),
        [REPETITIONS] * N_TEXTS,
        end_of_text=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        general_rows=GENERAL_ROWS,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
    )
    for step, first in enumerate(range(0, len(rows), BATCH_ROWS)):
        if step % STEPS_BETWEEN_CHECKS == 0:
            known = suffix_accuracy(model, new)
            print(
                f"step {step} of {len(rows) // BATCH_ROWS}: accuracy on the new texts "
                f"{known.mean():.3f}, least {known.min():.3f}; on {len(old)} planted ones "
                f"{suffix_accuracy(model, old).mean():.3f}",
                flush=True,
            )
            if known.min() >= MIN_ACCURACY:
                break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        loss = loss_of(model, torch.from_numpy(rows[first : first + BATCH_ROWS]).long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    later = arguments.folder / "later"
    model.eval().save_pretrained(later)
    tokenizer.save_pretrained(later)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (arguments.folder / "texts.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
