"""The options that commands share, and a line for the person at the terminal. Nothing here imports
torch, so that help comes at once.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Literal

from tqdm import tqdm
from typer import Argument, Option

of_model = partial(Option, rich_help_panel="The model")
of_data = partial(Option, rich_help_panel="The data")
of_run = partial(Option, rich_help_panel="The run")
of_print = partial(Option, rich_help_panel="What is printed")

# One text

Prefix = Annotated[str, Option(help="Text that prompts the model.")]
Suffix = Annotated[
    str, Option(help="Text that the model recites after it; it usually begins with a space.")
]
Example = Annotated[
    str, Option(help="Id of a shipped text, of those that tl-localize texts lists.")
]
Method = Annotated[str, Option(help="One of those that tl-localize methods lists.")]
FirstLayer = Annotated[int, Option(help="Layers below it are left out: layer 0 serves every text.")]
AblatedRatio = Annotated[
    float | None,
    Option(help="Share of each layer ablated to see what is forgotten. Default: 0.1; heads 0.17."),
]
Top = Annotated[int, Option(min=1, help="Number of neurons to print.")]
Force = Annotated[
    bool, Option("--force", help="Also rank neurons for a text that the model does not recite.")
]
ScoresFile = Annotated[
    Path | None,
    Option(help="Write the scores to this safetensors file, the token view beside it as .html."),
]

KnownFile = Annotated[
    Path | None, Option(help="Write the known texts to this file (.jsonl), for del.")
]

# The model

Model = Annotated[
    str, of_model(help="A reference model, a Hugging Face directory, or TransformerLens' name.")
]
Device = Annotated[
    str | None, of_model(help="Such as cpu or cuda. Default: CUDA when there is one.")
]
Dtype = Annotated[str, of_model(help="float32, bfloat16 or float16.")]

# The data

Texts = Annotated[
    Path | None,
    of_data(help="JSON lines of texts, or tokens, or a table. Default: our own sentences."),
]
OwnTexts = Annotated[
    Path | None, of_data(help="Texts of your own, beside those that everybody knows.")
]
Rows = Annotated[
    Path | None,
    of_data(help="Folder of collect, tokens, JSON lines, a table. Default: a reference model's."),
]
Corpora = Annotated[
    list[Path] | None, of_data(help="Texts, JSON lines, tokens, or a table; many times.")
]
General = Annotated[
    Path | None,
    of_data(help="Tokens [sequence pos] for the perplexity. Default: those of the collection."),
]
Suffixes = Annotated[
    Path | None,
    of_data("--suffixes", help="Token file of the suffixes, where --data holds prefixes alone."),
]
Key = Annotated[
    str, of_data(help="Column of the tokens or the text, where it has none of the known names.")
]
Id = Annotated[str, of_data(help="Column of the sequences' ids.")]
Category = Annotated[str, of_data(help="Column of their categories.")]
AnyTokens = Annotated[
    bool, of_data("--any-tokens", help="Also tokens that no text makes, such as random ones.")
]
PrefixLength = Annotated[
    str | None,
    of_data(help="Prompt tokens of each row, or the column of their number. Default: 32."),
]
SuffixLength = Annotated[
    int | None, of_data(help="Tokens to recite, of longer rows. Default: all.")
]
DevCount = Annotated[
    int, of_data(help="Of files: the first sequences, on which settings are chosen.")
]

# What is asked

Methods = Annotated[str, Option(help="Comma-separated names, or 'all'. Controls always run too.")]
Units = Annotated[str, Option(help="What is scored and ablated: neurons or heads.")]
MethodSettings = Annotated[
    list[str] | None,
    Option(help="A method's setting, such as hard_concrete.steps=200. Many times."),
]
SettingsFile = Annotated[Path | None, Option(help="Settings file that tl-localize tune wrote.")]
Distractors = Annotated[
    int, Option(help="Other sentences in the same model; 0 is the paper's form.")
]
Seed = Annotated[int, Option(help="Of all draws; sentence i of inj is drawn with seed + i.")]

InjRatios = Annotated[
    list[float] | None,
    Option(help="Share of the rows of W_out, or of heads, to write into. Many times."),
]
SentenceLimit = Annotated[
    int | None,
    Option(min=1, help="Number of sentences. Default: 5 on a reference model, else all."),
]
LearningRate = Annotated[
    float | None, Option(help="Of the injection. Default: the paper's, by ratio.")
]
MaxSteps = Annotated[int | None, Option(help="Of the injection. Default: the paper's, by ratio.")]
Exact = Annotated[bool, Option("--exact", help="Zero-Out: ablate all neurons, and not 5% of them.")]

DelRatios = Annotated[
    list[float] | None,
    Option(
        help="Shares to ablate. Default: 0.001, 0.005; reference models 0.02, 0.1; heads 0.17, "
        "0.34."
    ),
]
SequenceLimit = Annotated[
    int | None,
    Option(min=1, help="Sequences, dev ones included. Default: 105 without data, else all."),
]
Targets = Annotated[
    str | None,
    Option(help="How many, such as 25,zero_out=6. Default: 8 without data, else all."),
]
Ablation = Annotated[str, Option(help="What ablated neurons become: zero, mean or resample.")]
SingleLayer = Annotated[
    str | None, Option(help="Also spend the budget in one layer, for this method.")
]

WhichBenchmark = Annotated[Literal["inj", "del"], Option(help="On which benchmark.")]
Tuned = Annotated[
    str, Option(help="Method to tune: hard_concrete, slimming or another with settings.")
]
Grid = Annotated[
    Path | None,
    Option(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid."),
]
TunedRatio = Annotated[
    float | None,
    Option(help="inj: share of the rows to inject into. del: share of each layer to ablate."),
]

Windows = Annotated[str, Option(help="Of each row: first, or one every N tokens.")]
PromptTokens = Annotated[int, Option(help="Tokens that prompt the model.")]
RecitedTokens = Annotated[int, Option(help="Tokens that it must recite.")]
MinAccuracy = Annotated[float, Option(help="Of the suffix, teacher-forced.")]
MaxDistance = Annotated[
    int, Option(help="Characters between the greedy continuation and the suffix.")
]
MinDistinct = Annotated[int, Option(help="Distinct tokens in the suffix, true and generated.")]
MaxJaccard = Annotated[float, Option(help="Near-duplicates share more n-grams than this.")]
Ngram = Annotated[int, Option(help="Tokens of an n-gram.")]
CollectedDevCount = Annotated[
    int, Option(help="Sequences drawn to choose hyperparameters; they come first.")
]
MaxCount = Annotated[
    int | None,
    Option(help="Draw at most so many of what is found, dev ones included (the paper: 505)."),
]
GeneralCount = Annotated[
    int, Option(min=1, help="Sequences of 128 tokens for the perplexity, at most.")
]

# The run

Out = Annotated[
    Path | None, of_run(help="Results folder. Default: ./tl-localize-results/COMMAND-MODEL.")
]
Engine = Annotated[
    Literal["process", "ray"], of_run(help="Who computes: this process, or a Ray cluster.")
]
Address = Annotated[
    str | None, of_run(help="Of a Ray cluster. Default: one is started on this machine.")
]
Workers = Annotated[int | None, of_run(help="Of Ray. Default: as many as there is room for.")]
Gpus = Annotated[
    float | None,
    of_run(help="For each Ray worker, also a fraction. Default: 1 where there are GPUs."),
]
Shard = Annotated[
    str, of_run(help="i/n: do the i-th of n parts of the work, one for each job of an array.")
]
RetryFailed = Annotated[bool, of_run("--retry-failed", help="Try again what failed before.")]
Verbose = Annotated[bool, of_run("--verbose", "-v", help="A line for every task.")]
Quiet = Annotated[bool, of_run("--quiet", "-q", help="Nothing but errors.")]

Markdown = Annotated[bool, of_print("--markdown", help="Print the table as Markdown.")]
Csv = Annotated[bool, of_print("--csv", help="Print the table as CSV.")]

# A results folder

Folder = Annotated[Path, Argument(help="Results folder of tl-localize inj, del, tune or collect.")]
TablesFolder = Annotated[Path | None, Option(help="Where to write. Default: the folder itself.")]
TracedMethod = Annotated[
    str | None, Option(help="Only the numbers of this method, by its name in the frame.")
]
TracedRatio = Annotated[
    float | None, Option(help="Only the numbers of this ratio (inj: of the injection).")
]
TracedName = Annotated[
    str, Option(help="Only this sentence, group or target, or all whose names begin so.")
]


def say(text: str) -> None:
    """A line for the person at the terminal, broken between words; tables go to standard output,
    everything else to standard error.
    """
    if sys.stderr is None:  # it was closed
        return
    if sys.stderr.isatty():
        width = get_terminal_size().columns
        lines = [fill(line, width, break_on_hyphens=False) for line in text.splitlines()]
        text = "\n".join(lines)
    tqdm.write(text, file=sys.stderr)
