"""tl-localize known | methods: what there is."""

import pandas as pd
from rich.text import Text

from tl_localize.checks import check_between
from tl_localize.cli.command_options import KnownOptions
from tl_localize.cli.messages import say, say_next
from tl_localize.methods import METHODS
from tl_localize.report.terminal import bars, console, show
from tl_localize.report.token_view import BREAK
from tl_localize.texts.known import CONTROL, OWN, known
from tl_localize.texts.reference import DATA

WIDE = 100  # columns of a terminal that has room for categories
PREVIEW = 40  # characters of a text that a table shows


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
    data = options.columns.open(options.data) if options.data else None
    model = options.model.load()
    found = known(model, options.min_accuracy, data)
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
    categories = found.by_category().round(2)
    categories[""] = bars(categories["accuracy"], most=1)
    show(categories, "By what must be known:")
    show(found.counts_by_threshold().to_frame(), "What a threshold keeps:")
    say(f"{found}. {found.advice()}")
    name = options.model.model
    if options.out:
        found.save(options.out)
        say_next(f"tl-localize del --model {name} --data {options.out}")
    elif len(examples := others.index[others["kind"] != CONTROL]):
        say_next(f"tl-localize localize --model {name} --example {examples[0]}")
    else:
        say_next(
            f"tl-localize collect --model {name} --data CORPUS finds texts of its own training "
            "that a model recites."
        )
