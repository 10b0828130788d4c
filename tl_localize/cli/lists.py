"""tl-localize known | methods: what there is."""

from pathlib import Path

import pandas as pd
from rich.text import Text

from tl_localize.checks import check_between
from tl_localize.cli.command_options import KnownOptions
from tl_localize.cli.messages import command, say, say_next
from tl_localize.cli.pages import about_command, write_page
from tl_localize.evals.shared import reporter
from tl_localize.execution import Steps
from tl_localize.execution.run import show_progress
from tl_localize.files import check_out_file, prepare_folder
from tl_localize.methods import METHODS
from tl_localize.model.neurons import LanguageModel
from tl_localize.report.pages import PageTable
from tl_localize.report.terminal import bars, console, show
from tl_localize.report.token_view import BREAK
from tl_localize.stats import quantity
from tl_localize.texts.known import CONTROL, OWN, Known, known
from tl_localize.texts.reference import DATA, N_DEV

WIDE = 100  # columns of a terminal that has room for categories
PREVIEW = 40  # characters of a text that a table shows
# of a first run of DEL, which takes minutes
QUICK = "iterative_attribution,attribution,activations"
TARGETS = 8


def list_methods() -> None:
    asked = "you want to know"
    questions = pd.read_json(DATA / "questions.json").set_index(asked)
    for question, answer in questions.iterrows():
        show(answer.to_frame(question).rename_axis(asked))
    texts = {name: (method.__doc__ or "").split("\n\n")[0] for name, method in METHODS.items()}
    meanings = {name: " ".join(text.split()) for name, text in texts.items()}
    show(pd.DataFrame({"score of a neuron": meanings}).rename_axis("method"))


def preview(text: str) -> Text:
    """How a text begins, in one line of a table."""
    start = text[:PREVIEW] + "..." * (len(text) > PREVIEW)
    return Text(start.replace("\n", BREAK), no_wrap=True, overflow="ellipsis")


def show_known(options: KnownOptions) -> None:
    check_between(0, 1, min_accuracy=options.min_accuracy)
    if options.out:
        check_out_file(options.out, ".jsonl")
        if options.data and options.out.resolve() == options.data.resolve():
            raise ValueError(
                f"out must be another file than the data, got {str(options.out)!r} for both. "
                "Choose another name."
            )
    data = options.columns.read(options.data)
    model = options.model.load()
    steps = Steps()  # in memory: it has the bar of runs
    with show_progress(steps, 1, True):
        found = known(model, options.min_accuracy, data, progress=reporter(steps, "texts"))
    shown = found.frame.set_index("id").round({"accuracy": 2})
    shown["text"] = shown["text"].map(preview)
    if console().width < WIDE:  # ids are what is copied: they are not to be cut
        shown = shown.drop(columns="category")
    is_own = shown["kind"] == OWN
    is_known = found.frame["accuracy"] >= options.min_accuracy
    own, others = shown[is_own], shown[~is_own & is_known.to_numpy()]
    if len(own):
        show(own, "Your own texts, whatever their accuracy:")
    if len(others):
        title = f"Texts that the model recites with {options.min_accuracy:g} or more:"
        show(others, title)
    show(by_category(found), "By what must be known:")
    show(found.counts_by_threshold().to_frame(), "What a threshold keeps:")
    say(f"{found}. {found.advice()}")
    name = options.model.model
    n_known = len(found.sequences)
    if options.out:
        prepare_folder(options.out.parent)
        write_known_page(options.out.with_suffix(".html"), found, model, options)
        if n_known:
            found.save(options.out)
        else:
            options.out.unlink(missing_ok=True)  # of an earlier model or threshold
            say(f"{options.out} is not written, because no text is known; the page beside it is.")
    if options.out and n_known == 1:  # DEL needs another text
        say_next(command("erase", "--model", name, "--data", options.out, "--out", "edited"))
    elif options.out and n_known:
        dev = () if n_known > N_DEV else ("--n-dev", "0")  # else no text would be left
        quick = ("--methods", QUICK, "--targets", str(TARGETS))
        say_next(command("del", "--model", name, "--data", options.out, *dev, *quick))
    elif len(examples := others.index[others["kind"] != CONTROL]):
        say_next(command("localize", "--model", name, "--example", examples[0]))
    else:
        collect = command("collect", "--model", name, "--data", "CORPUS")
        say_next(f"{collect} finds texts of its own training that a model recites.")


def by_category(found: Known) -> pd.DataFrame:
    """Texts, known ones and mean accuracy of each category, with a bar."""
    categories = found.by_category().round(2)
    return categories.assign(**{"": bars(categories["accuracy"], most=1)})


def write_known_page(file: Path, found: Known, model: LanguageModel, options: KnownOptions) -> None:
    """The page beside the file of known texts: all texts that were tried, the best recited
    first.
    """
    name = options.model.model
    n_known = f"{len(found.sequences)} of {quantity(len(found.frame), 'text')}"
    least = f"with an accuracy of at least {found.min_accuracy:g}"
    about = {"model": name, "recited": f"{n_known} {least}. {found.advice()}".strip()}
    about["own texts"] = str(options.data or "")
    about |= about_command(model)
    texts = found.frame.set_index("id").round({"accuracy": 2})
    texts["text"] = texts["text"].str.replace("\n", BREAK)
    parts = [
        PageTable(by_category(found), "By what must be known; accuracy is a mean over the texts"),
        PageTable(found.counts_by_threshold().to_frame(), "What a threshold keeps"),
        PageTable(texts, "All texts; accuracy is the share of the suffix tokens that are recited"),
    ]
    write_page(file, parts, f"Texts that {name} recites", about)
