"""The commands, as a user types them.

A command hands all its options by name, as ``argparse.Namespace``, to one function below. That is
imported when the command runs, so that help comes at once.
"""

from __future__ import annotations

from argparse import Namespace

import typer

from tl_localize.cli import options as o


def demo(example: o.Example = "quotes-056") -> None:
    """A first look in half a minute: a text that the shipped model recites, and what ablating the
    named neurons does to it.
    """
    from tl_localize.cli.one_text import show_demo
    from tl_localize.report.terminal import console

    show_demo(console(), example)


def localize(
    context: typer.Context,
    prefix: o.Prefix = "",
    suffix: o.Suffix = "",
    example: o.Example = "",
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    method: o.Method = "hard_concrete",
    units: o.Units = "neurons",
    set: o.MethodSettings = None,
    first_layer: o.FirstLayer = 1,
    ratio: o.AblatedRatio = None,
    top: o.Top = 20,
    force: o.Force = False,
    out: o.ScoresFile = None,
) -> None:
    """Score every neuron for one text, print the best ones, and ablate the top share of each layer
    to see what is forgotten.

    With --units heads the same for attention heads.
    """
    from tl_localize.cli.one_text import localize_text

    localize_text(Namespace(**context.params))


def known(
    context: typer.Context,
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    data: o.OwnTexts = None,
    min_accuracy: o.MinAccuracy = 0.7,
    out: o.KnownFile = None,
    csv: o.Csv = False,
) -> None:
    """Which of about 180 texts that everybody knows does a model recite?

    They are rules, lists, prose and code, and each is continued after its first 16 tokens, or the
    first third of a short one. A repeated random string is a control: it is continued by copying,
    not from memory.
    """
    from tl_localize.cli.known import show_known

    show_known(Namespace(**context.params))


def inj(
    context: typer.Context,
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    data: o.Texts = None,
    key: o.Key = "",
    any_tokens: o.AnyTokens = False,
    methods: o.Methods = "all",
    units: o.Units = "neurons",
    ratio: o.InjRatios = None,
    limit: o.SentenceLimit = None,
    seed: o.Seed = 0,
    learning_rate: o.LearningRate = None,
    max_steps: o.MaxSteps = None,
    distractors: o.Distractors = 0,
    exact: o.Exact = False,
    set: o.MethodSettings = None,
    settings: o.SettingsFile = None,
    out: o.Out = None,
    engine: o.Engine = "process",
    address: o.Address = None,
    workers: o.Workers = None,
    gpus: o.Gpus = None,
    shard: o.Shard = "1/1",
    retry_failed: o.RetryFailed = False,
    verbose: o.Verbose = False,
    quiet: o.Quiet = False,
    markdown: o.Markdown = False,
    csv: o.Csv = False,
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
    context: typer.Context,
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    data: o.Rows = None,
    suffix: o.Suffixes = None,
    general: o.General = None,
    key: o.Key = "",
    id: o.Id = "",
    category: o.Category = "",
    any_tokens: o.AnyTokens = False,
    n_prefix: o.PrefixLength = None,
    n_suffix: o.SuffixLength = None,
    n_dev: o.DevCount = 5,
    methods: o.Methods = "all",
    units: o.Units = "neurons",
    ratio: o.DelRatios = None,
    limit: o.SequenceLimit = None,
    targets: o.Targets = None,
    ablation: o.Ablation = "zero",
    single_layer: o.SingleLayer = None,
    seed: o.Seed = 0,
    set: o.MethodSettings = None,
    settings: o.SettingsFile = None,
    out: o.Out = None,
    engine: o.Engine = "process",
    address: o.Address = None,
    workers: o.Workers = None,
    gpus: o.Gpus = None,
    shard: o.Shard = "1/1",
    retry_failed: o.RetryFailed = False,
    verbose: o.Verbose = False,
    quiet: o.Quiet = False,
    markdown: o.Markdown = False,
    csv: o.Csv = False,
) -> None:
    """DEL: ablate the neurons, or with --units the heads, that each method locates for a memorized
    sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of
    the perplexity, and writes a results folder with tables and figures. In a folder that is there
    it computes only what is missing. Without data a reference model's sequences are collected first
    (in all about 14 minutes on one core). Exit status 1: a task failed, or a shard has collected
    its part and others have not; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_del

    run_del(Namespace(**context.params))


def tune(
    context: typer.Context,
    benchmark: o.WhichBenchmark = "inj",
    method: o.Tuned = "hard_concrete",
    grid: o.Grid = None,
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    data: o.Rows = None,
    suffix: o.Suffixes = None,
    general: o.General = None,
    key: o.Key = "",
    id: o.Id = "",
    category: o.Category = "",
    any_tokens: o.AnyTokens = False,
    n_prefix: o.PrefixLength = None,
    n_suffix: o.SuffixLength = None,
    n_dev: o.DevCount = 5,
    units: o.Units = "neurons",
    ratio: o.TunedRatio = None,
    distractors: o.Distractors = 0,
    set: o.MethodSettings = None,
    out: o.Out = None,
    engine: o.Engine = "process",
    address: o.Address = None,
    workers: o.Workers = None,
    gpus: o.Gpus = None,
    shard: o.Shard = "1/1",
    retry_failed: o.RetryFailed = False,
    verbose: o.Verbose = False,
    quiet: o.Quiet = False,
) -> None:
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's,
    and so is the ratio, the largest of theirs. INJ keeps the highest mean recall; DEL the largest
    loss of accuracy on the target minus that on the others (Self minus Neg). Prints all settings,
    the best first, and writes settings.json for --settings of tl-localize inj or del. In a folder
    that is there it computes only what is missing.
    """
    from tl_localize.cli.benchmarks import run_tune

    run_tune(Namespace(**context.params))


def collect(
    context: typer.Context,
    model: o.Model = "reference-gpt2",
    device: o.Device = None,
    dtype: o.Dtype = "float32",
    data: o.Corpora = None,
    suffix: o.Suffixes = None,
    key: o.Key = "",
    id: o.Id = "",
    category: o.Category = "",
    any_tokens: o.AnyTokens = False,
    windows: o.Windows = "first",
    n_prefix: o.PromptTokens = 32,
    n_suffix: o.RecitedTokens = 48,
    min_accuracy: o.MinAccuracy = 0.9,
    max_distance: o.MaxDistance = 20,
    min_distinct: o.MinDistinct = 16,
    max_jaccard: o.MaxJaccard = 0.05,
    ngram: o.Ngram = 5,
    n_dev: o.CollectedDevCount = 5,
    n_max: o.MaxCount = None,
    n_general: o.GeneralCount = 2048,
    seed: o.Seed = 0,
    out: o.Out = None,
    engine: o.Engine = "process",
    address: o.Address = None,
    workers: o.Workers = None,
    gpus: o.Gpus = None,
    shard: o.Shard = "1/1",
    retry_failed: o.RetryFailed = False,
    verbose: o.Verbose = False,
    quiet: o.Quiet = False,
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


def status(folder: o.Folder) -> None:
    """What is done, missing and failed in a results folder, and about how long the rest takes one
    process.
    """
    from tl_localize.cli.folder import show_status

    show_status(folder)


def table(
    folder: o.Folder,
    out: o.TablesFolder = None,
    markdown: o.Markdown = False,
    csv: o.Csv = False,
) -> None:
    """All tables and figures from a results folder alone; the model is not needed.

    Exit status 1 as of the command that fills the folder, and where a record is damaged.
    """
    from tl_localize.cli.publish import conclude, form_of
    from tl_localize.execution import Store

    conclude(Store(folder, read_only=True), out or folder, form_of(markdown, csv))


def trace(
    folder: o.Folder,
    method: o.TracedMethod = None,
    ratio: o.TracedRatio = None,
    name: o.TracedName = "",
) -> None:
    """The tasks that a number in a table was made of, and their files."""
    from tl_localize.cli.folder import show_trace

    show_trace(folder, method, ratio, name)


def methods() -> None:
    """The methods by the name that --methods takes, and what their scores mean."""
    from tl_localize.cli.lists import list_methods

    list_methods()


def models() -> None:
    """What --model takes."""
    from tl_localize.cli.lists import list_models

    list_models()


def texts() -> None:
    """The shipped texts that the reference models saw in training, for --example of localize and
    demo.
    """
    from tl_localize.cli.lists import list_texts

    list_texts()
