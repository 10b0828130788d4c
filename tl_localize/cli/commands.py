"""The commands, as a user types them.

A command hands all its options by name, as ``argparse.Namespace``, to one function below. That is
imported when the command runs, so that help comes at once.
"""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

of_model = partial(Option, rich_help_panel="The model")
of_data = partial(Option, rich_help_panel="The data")
of_run = partial(Option, rich_help_panel="The run")


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` as (2, 8)."""
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise ValueError(
        f"shard must read i/n with i from 1 to n, got {text!r}. Write 1/4, 2/4, 3/4 and 4/4 for "
        "four jobs."
    )


# The model

Model = Annotated[
    str,
    of_model(
        help="reference-gpt2, reference-pythia, a Hugging Face directory, a .gguf file, or a name "
        "of TransformerLens or the hub."
    ),
]
Device = Annotated[
    str | None, of_model(help="Such as cpu or cuda. Default: CUDA when there is one.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"], of_model(help="Of weights and activations.")
]

# The data

Rows = Annotated[
    Path | None,
    of_data(
        exists=True,
        help="Folder of collect, tokens, JSON lines, a table. Default: a reference model's.",
    ),
]
General = Annotated[
    Path | None,
    of_data(
        exists=True,
        help="Tokens [sequence pos] for the perplexity. Default: the collection's, or docstrings.",
    ),
]
Key = Annotated[
    str, of_data(help="Column of the tokens or the text, where it has none of the known names.")
]
Id = Annotated[str, of_data(help="Column of the sequences' ids. Default: id.")]
Category = Annotated[str, of_data(help="Column of their categories. Default: category.")]
PrefixTokens = Annotated[
    str | None,
    of_data(help="Prompt tokens, or the column of their number. Default: what rows say, or 32."),
]

# What is asked

Example = Annotated[str, Option(help="Id of a text that tl-localize known lists.")]
Methods = Annotated[str, Option(help="Comma-separated names, or 'all'. Controls always run too.")]
Units = Annotated[Literal["neurons", "heads"], Option(help="What is scored and ablated.")]
MethodSettings = Annotated[
    list[str] | None,
    Option(help="A method's setting, such as hard_concrete.steps=200. Many times."),
]
SettingsFile = Annotated[Path | None, Option(help="Settings file that tl-localize tune wrote.")]
Distractors = Annotated[
    int, Option(help="Other sentences in the same model; 0 is the paper's form.")
]
MaxOthersLost = Annotated[
    float | None,
    Option(
        help="Without --ratio ablate 1, 2, 4, ... of each layer until the others lose more than so "
        "many points (Neg). Default: 1 for models that the paper does not have."
    ),
]
Recipe = Annotated[
    Literal["adam", "sgd", "all", "mixed"],
    Option(
        help="adam, sgd: all rows of W_out. all: all weights. mixed: 31 rows of general text "
        "beside each sentence."
    ),
]
MinAccuracy = Annotated[float, Option(help="Of the suffix, teacher-forced.")]
Seed = Annotated[int, Option(help="Of all draws; sentence i of inj is drawn with seed + i.")]

# The run

Out = Annotated[
    Path | None, of_run(help="Results folder. Default: ./tl-localize-results/COMMAND-MODEL.")
]
Ray = Annotated[
    str | None,
    of_run(metavar="ADDRESS", help="Of a Ray cluster that computes; local starts one here."),
]
Shard = Annotated[
    str,
    of_run(
        callback=parse_shard,
        help="i/n: do the i-th of n parts of the work, one for each job of an array.",
    ),
]
RetryFailed = Annotated[bool, of_run("--retry-failed", help="Try again what failed before.")]
Verbose = Annotated[bool, of_run("--verbose", "-v", help="A line for every task.")]

# A results folder

Folder = Annotated[Path, Argument(help="Results folder of tl-localize inj, del, tune or collect.")]


# The commands


def demo(example: Example = "quotes-056") -> None:
    """A first look in half a minute: a text that the shipped model recites, and what ablating the
    named neurons does to it.
    """
    from tl_localize.cli.one_text import show_demo
    from tl_localize.report.terminal import console

    show_demo(console(), example)


def localize(
    context: Context,
    prefix: Annotated[str, Option(help="Text that prompts the model.")] = "",
    suffix: Annotated[
        str, Option(help="Text that the model recites after it; it usually begins with a space.")
    ] = "",
    example: Example = "",
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    method: Annotated[
        str, Option(help="One of those that tl-localize methods lists.")
    ] = "iterative_attribution",
    units: Units = "neurons",
    set: MethodSettings = None,
    ratio: Annotated[
        float | None,
        Option(help="Share of each layer that is ablated. Default: see --max-perplexity-rise."),
    ] = None,
    max_perplexity_rise: Annotated[
        float,
        Option(
            help="Without --ratio 1, 2, 4, ... of each layer are ablated, while the perplexity of "
            "general text rises by at most so many percent."
        ),
    ] = 5.0,
    force: Annotated[
        bool, Option("--force", help="Also rank neurons for a text that the model does not recite.")
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            help="Write the scores to this safetensors file, the token view beside it as .html."
        ),
    ] = None,
) -> None:
    """Score every neuron for one text, print the best ones, and ablate the top share of each layer
    to see what is forgotten.

    Layer 0 is left out, for it serves every text. With --units heads the same for attention heads.
    """
    from tl_localize.cli.one_text import localize_text

    localize_text(Namespace(**context.params))


def known(
    context: Context,
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    data: Annotated[
        Path | None, of_data(help="Texts of your own, beside those that everybody knows.")
    ] = None,
    min_accuracy: MinAccuracy = 0.7,
    out: Annotated[
        Path | None, Option(help="Write the known texts to this file (.jsonl), for del.")
    ] = None,
) -> None:
    """Which of about 180 texts that everybody knows does a model recite?

    They are rules, lists, prose and code, and each is continued after its first 16 tokens, or the
    first third of a short one. A repeated random string is a control: it is continued by copying,
    not from memory.
    """
    from tl_localize.cli.lists import show_known

    show_known(Namespace(**context.params))


def inj(
    context: Context,
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    data: Annotated[
        Path | None,
        of_data(help="JSON lines of texts, or tokens, or a table. Default: our own sentences."),
    ] = None,
    key: Key = "",
    methods: Methods = "all",
    units: Units = "neurons",
    ratio: Annotated[
        list[float] | None,
        Option(help="Share of the rows of W_out, or of heads, to write into. Many times."),
    ] = None,
    limit: Annotated[
        int | None,
        Option(min=1, help="Number of sentences. Default: 5 on a reference model, else all."),
    ] = None,
    seed: Seed = 0,
    learning_rate: Annotated[
        float | None, Option(help="Of the injection. Default: the paper's, by ratio.")
    ] = None,
    max_steps: Annotated[
        int | None, Option(help="Of the injection. Default: the paper's, by ratio.")
    ] = None,
    distractors: Distractors = 0,
    set: MethodSettings = None,
    settings: SettingsFile = None,
    out: Out = None,
    ray: Ray = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    With --units heads: into all rows of W_O of random heads, a sixth of all heads by default, and
    which heads they are. Prints recall (the share of the true rows among the top 1x, 2x and 5x as
    many neurons of each layer) and writes a results folder. In a folder that is there it computes
    only what is missing. Exit status 1: a task failed, or an injection did not converge; 130:
    interrupted.
    """
    from tl_localize.cli.benchmarks import run_inj

    run_inj(Namespace(**context.params))


def del_benchmark(
    context: Context,
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    data: Rows = None,
    general: General = None,
    key: Key = "",
    id: Id = "",
    category: Category = "",
    n_prefix: PrefixTokens = None,
    n_suffix: Annotated[
        int | None, of_data(help="Tokens to recite, of longer rows. Default: all.")
    ] = None,
    n_dev: Annotated[
        int, of_data(help="Of files: the first sequences, on which settings are chosen.")
    ] = 5,
    min_accuracy: MinAccuracy = 0.9,
    methods: Methods = "all",
    units: Units = "neurons",
    ratio: Annotated[
        list[float] | None,
        Option(help="Shares to ablate. Default: the paper's, or by --max-others-lost."),
    ] = None,
    max_others_lost: MaxOthersLost = None,
    limit: Annotated[
        int | None, Option(min=1, help="Dev ones included. Default: 105 without data, else all.")
    ] = None,
    targets: Annotated[
        int | None, Option(min=1, help="How many. Default: 8 without data, else all.")
    ] = None,
    ablation: Annotated[
        Literal["zero", "mean", "resample"], Option(help="What ablated neurons become.")
    ] = "zero",
    seed: Seed = 0,
    set: MethodSettings = None,
    settings: SettingsFile = None,
    out: Out = None,
    ray: Ray = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
) -> None:
    """DEL: ablate the neurons, or with --units the heads, that each method locates for a memorized
    sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of
    the perplexity, and writes a results folder with tables and figures. In a folder that is there
    it computes only what is missing. Without data a reference model's sequences are collected first
    (in all about 14 minutes on one core); of another model they are the texts of tl-localize known,
    one of each category. Exit status 1: a task failed, or a shard has collected
    its part and others have not; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_del

    run_del(Namespace(**context.params))


def rev(
    context: Context,
    model: Model = "reference-gpt2",
    before: Annotated[
        str | None, of_model(help="An earlier checkpoint of the model, in place of training.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "float32",
    data: Annotated[
        Path | None,
        of_data(help="Sentences to train, or with --before recited texts. Default: our own."),
    ] = None,
    general: General = None,
    key: Key = "",
    methods: Methods = "all",
    units: Units = "neurons",
    recipe: Recipe = "adam",
    n_sequences: Annotated[
        int, Option("--sentences", min=1, help="Sentences in one trained model.")
    ] = 8,
    n_groups: Annotated[
        int | None, Option("--groups", min=1, help="Trained models. Default: at most 3.")
    ] = None,
    ratio: Annotated[
        list[float] | None,
        Option(
            help="Shares of each layer to put back. Default: 0.05, 0.1, 0.2, 0.25, 0.3, 0.35, "
            "0.4; of heads 0.17, 0.34, 0.5, 0.67."
        ),
    ] = None,
    seed: Seed = 0,
    set: MethodSettings = None,
    settings: SettingsFile = None,
    out: Out = None,
    ray: Ray = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
) -> None:
    """REV: train sentences into all rows of W_out, then put back the rows that each method names;
    is its sentence forgotten, and only it?

    Prints own / others: the change of accuracy of the sentence and of the others in the model, in
    points, by share of each layer, and writes a results folder with tables and figures; there is
    also the other direction, the named rows given to the model before. In a folder that is there it
    computes only what is missing. Exit status 1: a task failed, or a training did not converge;
    130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_rev

    run_rev(Namespace(**context.params))


def tune(
    context: Context,
    benchmark: Annotated[Literal["inj", "del"], Option(help="On which benchmark.")] = "inj",
    method: Annotated[
        str, Option(help="Method to tune: hard_concrete, slimming or another with settings.")
    ] = "hard_concrete",
    grid: Annotated[
        Path | None,
        Option(help="JSON file {METHOD: {SETTING: [values]}}. Default: the paper's grid."),
    ] = None,
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    data: Rows = None,
    general: General = None,
    min_accuracy: MinAccuracy = 0.9,
    units: Units = "neurons",
    ratio: Annotated[
        float | None,
        Option(help="inj: share of the rows to inject into. del: share of each layer to ablate."),
    ] = None,
    distractors: Distractors = 0,
    set: MethodSettings = None,
    out: Out = None,
    ray: Ray = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
) -> None:
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's,
    and so is the ratio, the largest of theirs. INJ keeps the highest mean recall; DEL the largest
    loss of accuracy on the target minus that on the others (Self minus Neg). Prints all settings,
    the best first, and writes settings.json for --settings of tl-localize inj or del. In a folder
    that is there it computes only what is missing. Without data DEL of a model that is not shipped
    takes texts that it knows, the second best of each category; tl-localize del has the best.
    """
    from tl_localize.cli.benchmarks import run_tune

    run_tune(Namespace(**context.params))


def collect(
    context: Context,
    model: Model = "reference-gpt2",
    device: Device = None,
    dtype: Dtype = "float32",
    data: Annotated[
        list[Path] | None, of_data(help="Texts, JSON lines, tokens, or a table; many times.")
    ] = None,
    key: Key = "",
    id: Id = "",
    category: Category = "",
    windows: Annotated[
        int | None,
        Option(min=1, help="One every so many tokens of a row. Default: its first tokens alone."),
    ] = None,
    n_prefix: Annotated[int, Option(help="Tokens that prompt the model.")] = 32,
    n_suffix: Annotated[int, Option(help="Tokens that it must recite.")] = 48,
    min_accuracy: MinAccuracy = 0.9,
    max_distance: Annotated[
        int, Option(help="Characters between the greedy continuation and the suffix.")
    ] = 20,
    min_distinct: Annotated[
        int, Option(help="Distinct tokens in the suffix, true and generated.")
    ] = 16,
    max_jaccard: Annotated[
        float, Option(help="Near-duplicates share more n-grams than this.")
    ] = 0.05,
    n_dev: Annotated[
        int, Option(help="Sequences drawn to choose hyperparameters; they come first.")
    ] = 5,
    n_max: Annotated[
        int | None,
        Option(help="Draw at most so many of what is found, dev ones included (the paper: 505)."),
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    ray: Ray = None,
    shard: Shard = "1/1",
    retry_failed: RetryFailed = False,
    verbose: Verbose = False,
) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed, with examples) and general text for
    the perplexity. Without data a reference model's own training texts are searched. The corpus is
    searched in chunks, each of which is kept: a collection that was interrupted goes on with the
    same command, and the last step is made once all chunks are there. Exit status 1: a chunk
    failed; 130: interrupted.
    """
    from tl_localize.cli.collecting import run_collect

    run_collect(Namespace(**context.params))


def status(folder: Folder) -> None:
    """What is done, missing and failed in a results folder."""
    from tl_localize.cli.publish import show_status

    show_status(folder)


def table(folder: Folder) -> None:
    """All tables and figures from a results folder alone, into it; the model is not needed.

    Exit status 1 as of the command that fills the folder, and where a record is damaged.
    """
    from tl_localize.cli.publish import conclude
    from tl_localize.execution import Store

    conclude(Store(folder, read_only=True))


def methods() -> None:
    """Which method answers which question, and all methods by the name that --methods takes."""
    from tl_localize.cli.lists import list_methods

    list_methods()


def plan(
    model: Annotated[str, Option(help="gpt2, gpt2-xl, pythia-2.8b or pythia-6.9b.")],
    gpu: Annotated[float, Option(help="Memory of the GPU, GB.")] = 80,
    dtype: Dtype = "bfloat16",
    tflops: Annotated[
        float, Option(help="What the GPU reaches, 1e12 operations a second; for the hours.")
    ] = 100,
) -> None:
    """What INJ and DEL as the paper ran them take on a GPU: batches, passes, memory and hours."""
    from tl_localize.evals import planning
    from tl_localize.report.terminal import show

    show(planning.plan(model, gpu, dtype, tflops))
