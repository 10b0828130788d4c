"""The commands, as a user types them.

The options of a command are one frozen dataclass (command_options.py), which goes to one function
as it is. That function is imported when the command runs, so that help comes at once.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from tl_localize.cli.command_options import (
    CollectOptions,
    DelOptions,
    EraseOptions,
    InjOptions,
    KnownOptions,
    LocalizeOptions,
    RevOptions,
    TuneOptions,
)
from tl_localize.cli.options import (
    Example,
)


def default_text(value: object) -> str | None:
    """A default as help shows it; what is off or left open is not shown."""
    is_open = value is None or value is False or value in ("", ())
    return None if is_open else str(value)


OPTIONS = Group("Options", sort_key=0)
FIRST_STEPS = Group("First steps", sort_key=1)
BENCHMARKS = Group("Benchmarks", sort_key=2)
A_FOLDER = Group("A results folder", sort_key=3)
WHAT_THERE_IS = Group("What there is", sort_key=4)

app = App(
    name="tl-localize",
    help="Which MLP neurons make a language model recite a text? Begin with tl-localize demo.",
    help_flags=["--help", "-h"],
    version_flags=["--version"],
    group_parameters=OPTIONS,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), allow_repeating=True, show_default=default_text),
)
for flag in ("--help", "--version"):
    app[flag].group = OPTIONS


Folder = Annotated[
    Path, Parameter(help="Results folder of tl-localize inj, del, rev, tune or collect.")
]


# First steps


@app.command(group=FIRST_STEPS, sort_key=1)
def demo(*, example: Example = "quotes-056") -> None:
    """A first look in half a minute: a text that the shipped model recites, and what ablating the
    named neurons does to it.
    """
    from tl_localize.cli.one_text import show_demo
    from tl_localize.report.terminal import console

    show_demo(console(), example)


@app.command(group=FIRST_STEPS, sort_key=2)
def localize(options: LocalizeOptions = LocalizeOptions()) -> None:
    """Score every neuron for one text, print the best ones, and ablate the top share of each layer
    to see what is forgotten.

    Layer 0 is left out, for it serves every text. With --units heads the same for attention heads.
    """
    from tl_localize.cli.one_text import localize_text

    localize_text(options)


@app.command(group=FIRST_STEPS, sort_key=3)
def known(options: KnownOptions = KnownOptions()) -> None:
    """Which of about 180 texts that everybody knows does a model recite?

    They are rules, lists, prose and code, and each is continued after its first 16 tokens, or the
    first third of a short one. A repeated random string is a control: it is continued by copying,
    not from memory.
    """
    from tl_localize.cli.lists import show_known

    show_known(options)


@app.command(group=FIRST_STEPS, sort_key=4)
def erase(options: EraseOptions = EraseOptions()) -> None:
    """Change a few rows of W_out so that the model no longer recites a text, or many, and write it
    as a folder that transformers loads.

    The edit goes on until the texts are erased or other text loses more than it may. Prints what is
    left of the texts and what other texts lost, before and after; all other weights stay as they
    are. Exit status 1: the texts are not erased; 2: no edit keeps the price, and nothing is
    written.
    """
    from tl_localize.cli.erasing import erase_texts

    erase_texts(options)


# Benchmarks


@app.command(group=BENCHMARKS, sort_key=1)
def inj(options: InjOptions = InjOptions()) -> None:
    """INJ: write new sentences into random rows of W_out, then ask each method which rows they are.

    With --units heads: into all rows of W_O of random heads, a sixth of all heads by default, and
    which heads they are. Prints recall (the share of the true rows among the top 1x, 2x and 5x as
    many neurons of each layer) and writes a results folder. In a folder that is there it computes
    only what is missing. Exit status 1: something failed or is missing, or an injection did not
    converge; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_inj

    run_inj(options)


@app.command(name="del", group=BENCHMARKS, sort_key=2)
def del_benchmark(options: DelOptions = DelOptions()) -> None:
    """DEL: ablate the neurons, or with --units the heads, that each method locates for a memorized
    sequence; is it forgotten, and only it?

    Prints the change of accuracy and distance of the sequence (Self) and the others (Neg) and of
    the perplexity, and writes a results folder with tables and figures. In a folder that is there
    it computes only what is missing. Without data a reference model's sequences are collected first
    (in all about 14 minutes on one core); of another model they are the texts of tl-localize known,
    one of each category. Exit status 1: something failed or is missing, or a shard has collected
    its part and others have not; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_del

    run_del(options)


@app.command(group=BENCHMARKS, sort_key=3)
def rev(options: RevOptions = RevOptions()) -> None:
    """REV: train sentences into all rows of W_out, then put back the rows that each method names;
    is its sentence forgotten, and only it?

    Prints own / others: the change of accuracy of the sentence and of the others in the model, in
    points, by share of each layer, and writes a results folder with tables and figures; there is
    also the other direction, the named rows given to the model before. In a folder that is there it
    computes only what is missing. Exit status 1: something failed or is missing, or a training did
    not converge; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_rev

    run_rev(options)


@app.command(group=BENCHMARKS, sort_key=4)
def tune(options: TuneOptions = TuneOptions()) -> None:
    """Try every setting of a grid on the dev sequences of a benchmark and keep the best one.

    What the grid leaves open is as in tl-localize inj or del, for the paper's models the paper's,
    and so is the ratio, the largest of theirs. INJ keeps the highest mean recall; DEL the largest
    loss of accuracy on the target minus that on the others (Self minus Neg). Prints all settings,
    the best first, and writes best_settings.json for --settings of tl-localize inj or del. In a
    folder that is there it computes only what is missing. Without data DEL of a model that is not
    shipped takes texts that it knows, the second best of each category; tl-localize del has the
    best. Exit status 1: something failed or is missing; 130: interrupted.
    """
    from tl_localize.cli.benchmarks import run_tune

    run_tune(options)


@app.command(group=BENCHMARKS, sort_key=5)
def collect(options: CollectOptions = CollectOptions()) -> None:
    """Find the sequences of a corpus that a model has memorized, for tl-localize del.

    Writes them with a report (how many each criterion removed) and general text for the perplexity.
    Without data a reference model's own training texts are searched. The corpus is searched in
    chunks, each of which is kept: a collection that was interrupted goes on with the same command,
    and the last step is made once all chunks are there. Exit status 1: a chunk failed or is
    missing; 130: interrupted.
    """
    from tl_localize.cli.collecting import run_collect

    run_collect(options)


# A results folder


@app.command(group=A_FOLDER, sort_key=1)
def status(folder: Folder, /) -> None:
    """What is done, missing and failed in a results folder."""
    from tl_localize.cli.publish import show_status

    show_status(folder)


@app.command(group=A_FOLDER, sort_key=2)
def table(
    folder: Annotated[Path, Parameter(help="Results folder of tl-localize inj, del, rev or tune.")],
    /,
) -> None:
    """All tables and figures from a results folder alone, into it; the model is not needed.

    Exit status 1: something failed, is missing or did not converge.
    """
    from tl_localize.cli.publish import conclude
    from tl_localize.execution import Store

    conclude(Store(folder, read_only=True))


# What there is


@app.command(group=WHAT_THERE_IS, sort_key=1)
def methods() -> None:
    """Which method answers which question, and all methods by the name that --methods takes."""
    from tl_localize.cli.lists import list_methods

    list_methods()
