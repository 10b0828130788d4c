"""The whole command on random models: a tiny Llama, and the paper's shapes with two layers of small
width. It says nothing of localization.

    pytest benchmarks/real/test_smoke.py -m smoke
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from costs import SHAPES
from frames import read_frames
from kept import bring, kept, without_texts, write_archive
from page import NOT_YET, SECTIONS, write_page
from paper_texts import ECBD, EXPANDED, MANUAL, RANDOM_BATCH, TOKENIZER
from plan import Plan
from real_model import RealModel

from tl_localize.execution.store import unpack

HERE = Path(__file__).parent
N_LAYERS, HEAD_SIZE, N_POSITIONS = 2, 8, 128
VOCABULARY = 4096  # of the shipped tokenizer
# directory -> shape
PAPER_SHAPES = {
    "gpt2": "gpt2",
    "gpt2-xl": "gpt2-xl",
    "pythia-2.8b-deduped": "pythia-2.8b",
    "pythia-6.9b-deduped": "pythia-6.9b",
}
N_FIRST, N_LATER = 13, 3  # sentences of 2021, and of 2022 and 2023
N_MANUAL, N_TARGETS = 6, 2  # texts, and those of them that a rehearsal ablates
# of the rehearsal's plan, which has no search for the paper's models
WITHOUT_SEARCH = {"The search of the masks' settings"}


@pytest.mark.smoke
def test_smoke_a_limit_draws_the_groups_of_the_plan() -> None:
    plan = Plan()
    few = plan.limited(1)
    assert (few.n_rev, few.n_rev_drawn, few.n_groups) == (1, plan.n_rev, plan.n_groups)
    assert few.sentences == {0.01: 1, 0.001: 1} and few.n_targets == few.n_zero_out == 1
    assert plan.limited(None) == plan


def save_model(folder: Path, n_heads: int, family: str) -> None:
    """A random model of two layers, with a shipped tokenizer."""
    import transformers

    from tl_localize.texts.reference import DATA

    sizes: Any = {
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": n_heads,
        "hidden_size": HEAD_SIZE * n_heads,
        "max_position_embeddings": N_POSITIONS,
        "vocab_size": VOCABULARY,
    }
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(**sizes)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        sizes["intermediate_size"] = 4 * HEAD_SIZE * n_heads
        kinds: Any = {"llama": "Llama", "pythia": "GPTNeoX"}
        config = getattr(transformers, f"{kinds[family]}Config")(**sizes)
        getattr(transformers, f"{kinds[family]}ForCausalLM")(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "reference-gpt2" / file, folder)


def save_data(folder: Path) -> None:
    """Texts of our own in the layout of the paper's data."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from tl_localize.texts.reference import DATA

    lines = (DATA / "inj_sentences.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    manual = ""
    for i, line in enumerate(lines[-N_MANUAL:]):
        words = json.loads(line)["definition"].split(" ")
        row = {"prompt": " ".join(words[:3]), "all": " ".join(words[:12])}
        manual += json.dumps({**row, "category": [("poems", "url")[i % 2]]}) + "\n"
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    texts = {
        ECBD: "".join(lines[:N_FIRST]),
        EXPANDED: "".join(lines[: N_FIRST + N_LATER]),
        MANUAL: manual,
        f"{TOKENIZER}/vocab.json": json.dumps(letters | {"<|endoftext|>": len(letters)}),
        f"{TOKENIZER}/merges.txt": "#version: 0.2\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(200, (4, 128), generator=generator)
    for name in (RANDOM_BATCH, *(f"pile/{name}/pile_bs0.pt" for name in PAPER_SHAPES)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(tokens if name == RANDOM_BATCH else tokens[:, :80], folder / name)


def rehearse(models: list[Path], data: Path, results: Path, *options: str) -> None:
    """``pytest benchmarks/ --real`` in a process of its own, as a user calls it."""
    command = [sys.executable, "-m", "pytest", str(HERE.parent), "--real", "--rehearse", "-q", "-x"]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider", "--paper-data", str(data)]
    command += ["--results", str(results), "--device", "cpu", *options]
    command += [part for path in models for part in ("--model", str(path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def check_pages(results: Path, names: list[str], lacking: set[str]) -> None:
    """Every section of each page is filled, and the page is made again of its frames alone."""
    for name in names:
        folder = results / name / "rehearsal"
        text = (folder / "page.md").read_text(encoding="utf-8")
        empty = {part.split("\n")[0] for part in text.split("\n## ") if NOT_YET.strip() in part}
        assert empty <= lacking, f"{name}: {empty}"
        assert list((folder / "figures").glob("*.png"))
        again = write_page(folder / "frames", folder.parent / "again", name, draw=False)
        assert again.read_text(encoding="utf-8") == text
        assert set(SECTIONS) >= lacking
        deletion = read_frames(folder / "frames")["deletion"]
        assert deletion["sequence_id"].nunique() == N_TARGETS


@pytest.mark.smoke
def test_smoke_every_part_on_a_tiny_model(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny-llama", 4, "llama")
    save_data(tmp_path / "data")
    rehearse([tmp_path / "tiny-llama"], tmp_path / "data", tmp_path / "results")
    check_pages(tmp_path / "results", ["tiny-llama"], set())
    check_archive(tmp_path / "results" / "tiny-llama" / "rehearsal", tmp_path)


def check_archive(folder: Path, room: Path) -> None:
    """An archive holds every row, nothing large, and no text; what it brings is what was there."""
    write_archive(folder, room / "rows.zip")
    bring(room / "rows.zip", room / "elsewhere")
    files = [path for path in kept(folder) if without_texts(path) is not None]
    assert len(files) < len(kept(folder))  # Activation Contrast was given texts
    brought = [room / "elsewhere" / path.relative_to(folder) for path in files]
    for path, there in zip(files, brought, strict=True):
        if path.suffix != ".json" and path.parent.name in ("inj", "del", "rev"):
            assert there.read_bytes() == path.read_bytes()
        else:
            assert without_texts(there) == there.read_bytes()
    assert {path.parent.name for path in files} >= {"inj", "del", "rev", "before"}
    rows = [
        json.loads(line)
        for name in (ECBD, MANUAL)
        for line in (room / "data" / name).read_text(encoding="utf-8").splitlines()
    ]
    texts = [(row.get("definition") or row["all"])[:20] for row in rows]
    for path in brought:
        held = (
            json.loads(path.read_bytes()) if path.suffix == ".json" else unpack(path.read_bytes())
        )
        check_no_texts(held, texts, str(path))
    brought[0].write_bytes(b"newer")
    bring(room / "rows.zip", room / "elsewhere")
    assert brought[0].read_bytes() == b"newer"


def check_no_texts(value: Any, texts: list[str], place: str) -> None:
    """No part of a JSON value holds the beginning of a text, or so many token ids."""
    if isinstance(value, str):
        assert not any(text in value for text in texts), place
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        is_number = [isinstance(part, int) and not isinstance(part, bool) for part in value]
        assert not (len(value) >= 8 and all(is_number)), place
        for part in value:
            check_no_texts(part, texts, place)


@pytest.mark.smoke
def test_smoke_a_run_of_fewer_texts_lacks_nothing(tmp_path: Path) -> None:
    from tl_localize import DelBenchmark, RandomBaseline, load_model, reference_sequences
    from tl_localize.execution import Store
    from tl_localize.texts.reference import held_out_tokens

    model = load_model("reference-gpt2")
    texts = [replace(text, tokens=text.tokens[:40]) for text in reference_sequences(model)[:3]]
    general = held_out_tokens()[:1, :16]
    two, one = (DelBenchmark(model, texts, general, n_dev=0, n_targets=n) for n in (2, 1))
    store = Store(tmp_path)
    broken_off = two.run([RandomBaseline()], store, shard=(1, 2), progress=False)
    assert len(broken_off.missing)
    real = RealModel("reference-gpt2", model, Plan(), tmp_path, tmp_path)
    assert len(real.run(one, [RandomBaseline()], store).missing)
    with pytest.raises(AssertionError, match="memory"):
        real.run(two, [Broken()], store)


@dataclass(frozen=True)
class Broken:
    """A method that fails."""

    name: str = "broken"

    def __call__(self, model: Any, sequence: Any) -> Any:
        raise MemoryError("no memory is left")


def rehearse_shapes(names: list[str], folder: Path) -> None:
    for name in names:
        shape = SHAPES[PAPER_SHAPES[name]]
        save_model(folder / name, shape["n_heads"], name.partition("-")[0])
    save_data(folder / "data")
    rehearse([folder / name for name in names], folder / "data", folder / "results")
    check_pages(folder / "results", names, WITHOUT_SEARCH)


@pytest.mark.smoke
def test_smoke_rehearsal_of_a_model_of_the_paper(tmp_path: Path) -> None:
    rehearse_shapes(["pythia-2.8b-deduped"], tmp_path)


@pytest.mark.smoke
@pytest.mark.slow
def test_smoke_rehearsal_of_all_models_of_the_paper(tmp_path: Path) -> None:
    rehearse_shapes(list(PAPER_SHAPES), tmp_path)


@pytest.mark.smoke
def test_smoke_each_point_of_the_grids_is_tried_once() -> None:
    """Slimming's default is one of them."""
    from plan import GRIDS
    from real_model import with_grids

    from tl_localize import HardConcrete, MLPNeurons, Slimming
    from tl_localize.methods.base import label_methods

    methods = with_grids([Slimming(), HardConcrete()], GRIDS)
    assert len(label_methods(methods, MLPNeurons())) == 12 + 12 + 1
    spared = with_grids([Slimming(first_layer=1)], GRIDS, first_layer=1)
    assert len(spared) == 12 + 12 and all(method.first_layer == 1 for method in spared)
