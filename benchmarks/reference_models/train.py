"""Train the two reference models that the package ships, on text every Python has and on planted
sequences.

Tokenizer and planted sequences:

    python benchmarks/reference_models/train.py corpus

A model, in about an hour on one core; what is interrupted goes on from runs/:

    python benchmarks/reference_models/train.py gpt2
    python benchmarks/reference_models/train.py pythia

Criteria and perplexity of the exported model again:

    python benchmarks/reference_models/train.py gpt2 --evaluate

The third model of docs/results, which memorized less well:

    python benchmarks/reference_models/train.py gpt2 --most-repetitions 64 --general-rows 7000 \\
        --runs runs/third --out runs/third/model
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from generator import (
    CATEGORIES,
    N_GROUPS,
    REPETITIONS,
    invented_text,
    planted_sequences,
    save_planted,
)
from jaxtyping import Int32
from rapidfuzz.distance import Levenshtein
from stream import (
    END_OF_TEXT,
    GENERAL_ROWS,
    HERE,
    ROW_LENGTH,
    SEED,
    general_texts,
    reference_stream,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    PreTrainedTokenizerFast,
)

from tl_localize.texts.reference import (
    CORPUS_DIR,
    DATA,
    N_PREFIX,
    N_SUFFIX,
    N_TOKENS,
    PlantedSequence,
    held_out_tokens,
    load_planted,
)

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gpt2", "pythia")
VOCAB = 4096
BATCH_ROWS = 5
LEARNING_RATE, FINAL_SHARE, WARM_UP = 1.2e-3, 0.03, 200
WEIGHT_DECAY = 0.1  # with the small learning rate it keeps rows of W_out short and neurons alive
MIN_ACCURACY, MAX_DISTANCE, MIN_DISTINCT = 0.9, 20, 16
CHECKPOINT_SECONDS = 240


# ---- corpus


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds nothing when it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    end = END_OF_TEXT
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        clean_up_tokenization_spaces=False,
    )


def digest(rows: np.ndarray) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the training rows."""
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]


def build_corpus() -> None:
    """Write the tokenizer into both model folders, and the planted sequences and corpus list."""
    general = general_texts()
    slots = sum(REPETITIONS.values())
    invented = [
        invented_text(
            CATEGORIES[i % len(CATEGORIES)], i % N_GROUPS, random.Random(f"tokenizer {i}")
        )
        for i in range(slots)
    ]
    tokenizer = train_tokenizer([text.text for text in general if not text.held_out] + invented)
    for name in NAMES:
        folder = DATA / f"reference-{name}"
        tokenizer.save_pretrained(folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        # the name that transformers 4 knows too
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    planted = planted_sequences(tokenizer)
    CORPUS_DIR.mkdir(parents=True, exist_ok=True)
    save_planted(planted)

    tokens = [tokenizer.encode(text.text, add_special_tokens=False) for text in general]
    stream = reference_stream(tokenizer)
    totals = {
        "general_documents": len(general),
        "general_training_tokens": sum(
            len(ids) for text, ids in zip(general, tokens, strict=True) if not text.held_out
        ),
        "planted_sequences": len(planted),
        "planted_tokens_in_training": sum(sequence.repetitions for sequence in planted) * N_TOKENS,
        "training_rows": len(stream),
        "training_tokens": stream.size,
        "row_length": ROW_LENGTH,
    }
    head = {
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "seed": SEED,
        "general_rows": GENERAL_ROWS,
        "repetitions": {str(count): number for count, number in REPETITIONS.items()},
        "stream_sha256": digest(stream),
        "totals": totals,
        "general_columns": ["name", "sha256, first 16 digits", "tokens", "split"],
    }
    listed = ",\n".join(
        json.dumps([text.name, text.sha, len(ids), "held-out" if text.held_out else "training"])
        for text, ids in zip(general, tokens, strict=True)
    )
    body = json.dumps(head, indent=1)[:-2] + ',\n "general": [\n' + listed + "\n]}\n"
    (HERE / "corpus.json").write_text(body)
    print(json.dumps(totals, indent=1))


# ---- training


def new_model(name: str) -> transformers.PreTrainedModel:
    """An untrained reference model with seeded weights."""
    torch.manual_seed(SEED)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_positions=256, n_embd=192, n_layer=6, n_head=6, n_inner=1536,
            activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends,
        )  # fmt: skip
    else:
        config = GPTNeoXConfig(
            vocab_size=VOCAB, max_position_embeddings=256, hidden_size=192, num_hidden_layers=6,
            num_attention_heads=6, intermediate_size=1536, hidden_act="gelu",
            use_parallel_residual=True, tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25
            },
            **ends,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy of the next token in nats."""
    logits = model(rows).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then cosine decay to a small share."""
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEARNING_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    name: str, rows: Int32[np.ndarray, "row pos"], device: str, runs: Path, max_steps: int | None
) -> transformers.PreTrainedModel:
    """Train from the start, or from the checkpoint in `runs`, to the end of the stream."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / f"reference-{name}")
    stream = digest(rows)
    steps = len(rows) // BATCH_ROWS
    model = new_model(name).to(device).train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    if name == "gpt2":
        body: Any = model.transformer
        for block in body.h:  # gelu_new, but in one kernel
            block.mlp.act = torch.nn.GELU(approximate="tanh")
    runs.mkdir(parents=True, exist_ok=True)
    checkpoint = runs / "checkpoint.pt"
    first = 0
    seconds_before = 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["stream"] != stream:
            raise ValueError(
                f"{checkpoint} belongs to another training stream. Remove it to start anew."
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds_before = state["step"], state["seconds"]
    print(
        f"{name}: {steps} steps of {BATCH_ROWS} x {rows.shape[1]} tokens, stream {stream}, from "
        f"step {first}",
        flush=True,
    )

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "stream": stream,
        }
        torch.save(
            state | {"seconds": seconds_before + time.time() - began},
            checkpoint.with_suffix(".new"),
        )
        os.replace(checkpoint.with_suffix(".new"), checkpoint)

    began = saved = time.time()
    total = torch.zeros((), device=device)
    last = steps if max_steps is None else min(steps, max_steps)
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = (
            torch.from_numpy(rows[step * BATCH_ROWS : (step + 1) * BATCH_ROWS]).long().to(device)
        )
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
        if (step + 1) % 50 == 0:
            rate = (step + 1 - first) / (time.time() - began)
            print(
                f"step {step + 1}/{steps} loss {total.item() / 50:.3f} "
                f"{rate * batch.numel():.0f} tokens/s {(last - step - 1) / rate / 60:.1f} min left",
                flush=True,
            )
            total.zero_()
        if (step + 1) % 500 == 0:
            print(
                f"accuracy by repetitions {accuracy_by_repetitions(model, tokenizer)}", flush=True
            )
        if time.time() - saved > CHECKPOINT_SECONDS:
            save(step + 1)
            saved = time.time()
    save(last)
    print(f"trained {seconds_before + time.time() - began:.0f} s in all", flush=True)
    return model.eval()


# ---- evaluation and export


@torch.no_grad()
def suffix_accuracy(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Teacher-forced share of suffix tokens predicted right, for each sequence."""
    predicted = model(tokens).logits[:, N_PREFIX - 1 : -1].argmax(-1)
    return (predicted == tokens[:, N_PREFIX:]).double().mean(1)


def accuracy_by_repetitions(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> dict[int, float]:
    """Mean teacher-forced accuracy for each number of repetitions, a glance during training."""
    planted = load_planted()
    tokens = tokenizer([s.text for s in planted], add_special_tokens=False, return_tensors="pt")[
        "input_ids"
    ]
    accuracy = suffix_accuracy(model, tokens.to(next(model.parameters()).device)).cpu()
    counts = torch.tensor([sequence.repetitions for sequence in planted])
    return {count: round(accuracy[counts == count].mean().item(), 3) for count in REPETITIONS}


@torch.no_grad()
def memorized(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, planted: list[PlantedSequence]
) -> list[dict]:
    """The paper's criteria for each planted sequence: teacher-forced accuracy, greedy distance,
    distinct tokens.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor(
        tokenizer([s.text for s in planted], add_special_tokens=False)["input_ids"], device=device
    )
    prefix, suffix = tokens[:, :N_PREFIX], tokens[:, N_PREFIX:]
    accuracy = suffix_accuracy(model, tokens).tolist()
    greedy = prefix
    output = model(prefix, use_cache=True)
    for _ in range(N_SUFFIX):
        following = output.logits[:, -1].argmax(-1, keepdim=True)
        greedy = torch.cat([greedy, following], 1)
        output = model(following, past_key_values=output.past_key_values, use_cache=True)
    results = []
    for i, sequence in enumerate(planted):
        continuation, truth = greedy[i, N_PREFIX:].tolist(), suffix[i].tolist()
        distance = Levenshtein.distance(tokenizer.decode(continuation), tokenizer.decode(truth))
        distinct = [len(set(truth)), len(set(continuation))]
        passed = (
            accuracy[i] >= MIN_ACCURACY
            and distance <= MAX_DISTANCE
            and min(distinct) >= MIN_DISTINCT
        )
        results.append(
            {
                "id": sequence.id,
                "repetitions": sequence.repetitions,
                "accuracy": round(accuracy[i], 6),
                "distance": distance,
                "distinct": distinct[0],
                "distinct_greedy": distinct[1],
                "passed": passed,
            }
        )
    return results


@torch.no_grad()
def held_out_nats(model: torch.nn.Module) -> list[float]:
    """Mean nats per token of each row of held-out general text; exp of their mean is the
    perplexity.
    """
    device = next(model.parameters()).device
    return [loss_of(model, row[None].long().to(device)).item() for row in held_out_tokens()]


def summary(results: list[dict]) -> dict[str, dict[str, float]]:
    """Count, passed, mean accuracy and mean distance for each number of repetitions."""
    table: dict[str, dict[str, float]] = {}
    for repetitions in sorted({result["repetitions"] for result in results}):
        chosen = [result for result in results if result["repetitions"] == repetitions]
        table[str(repetitions)] = {
            "sequences": len(chosen),
            "passed": sum(result["passed"] for result in chosen),
            "accuracy": round(sum(result["accuracy"] for result in chosen) / len(chosen), 4),
            "distance": round(sum(result["distance"] for result in chosen) / len(chosen), 2),
        }
    return table


def export(model: transformers.PreTrainedModel, out: Path) -> None:
    """Write the weights as fp16; the tokenizer is there already or is copied."""
    model.half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "float16"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not (out / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(DATA / "reference-gpt2").save_pretrained(out)


def evaluate(out: Path, device: str) -> None:
    """Evaluate what is shipped (fp16 weights in float32 arithmetic) and write memorized.json."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device).eval()
    nats = held_out_nats(model)
    results = memorized(model, AutoTokenizer.from_pretrained(out), load_planted())
    head = {
        "criteria": {
            "accuracy": f"teacher-forced on the 48 suffix tokens, at least {MIN_ACCURACY}",
            "distance": "Levenshtein characters of the greedy continuation, at most "
            f"{MAX_DISTANCE}",
            "distinct": "distinct tokens in the suffix and in the continuation, at least "
            f"{MIN_DISTINCT}",
        },
        "passed": sum(result["passed"] for result in results),
        "perplexity": round(math.exp(sum(nats) / len(nats)), 4),
        "by_repetitions": summary(results),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    listed = ",\n".join("  " + json.dumps(result) for result in results)
    row_nats = json.dumps([round(value, 5) for value in nats])
    body = (
        json.dumps(head, indent=1)[:-2]
        + f',\n "held_out_nats": {row_nats},\n "sequences": [\n{listed}\n]}}\n'
    )
    (out / "memorized.json").write_text(body)
    print(json.dumps(head, indent=1), flush=True)


def main() -> None:
    """Parse the command line and run one of the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("corpus", *NAMES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, help="folder of the exported model; default: in the package"
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the checkpoint; default: runs/reference-NAME"
    )
    parser.add_argument(
        "--most-repetitions",
        type=int,
        help="repeat no planted text more often; default: as often as corpus.json says",
    )
    parser.add_argument(
        "--general-rows", type=int, default=GENERAL_ROWS, help="rows of general text alone"
    )
    parser.add_argument("--max-steps", type=int, help="stop early, to measure speed")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the exported model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    if arguments.what == "corpus":
        return build_corpus()
    out = arguments.out or DATA / f"reference-{arguments.what}"
    if not arguments.evaluate:
        runs = arguments.runs or ROOT / "runs" / f"reference-{arguments.what}"
        rows = reference_stream(
            AutoTokenizer.from_pretrained(DATA / f"reference-{arguments.what}"),
            most_repetitions=arguments.most_repetitions,
            general_rows=arguments.general_rows,
        )
        export(train(arguments.what, rows, arguments.device, runs, arguments.max_steps), out)
    evaluate(out, arguments.device)
    return None


if __name__ == "__main__":
    main()
