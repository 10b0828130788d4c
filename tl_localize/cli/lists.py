"""tl-localize known | methods: what there is."""

from argparse import Namespace

import pandas as pd
from rich.text import Text

from tl_localize.cli.running import load, own_data, say
from tl_localize.collect.known import OWN, known
from tl_localize.methods import METHODS
from tl_localize.neurons import check_between
from tl_localize.reference import DATA
from tl_localize.report.terminal import console, show
from tl_localize.report.token_view import BREAK

WIDE = 100  # columns of a terminal that has room for categories
PREVIEW = 40  # characters of a text that a table shows


def list_methods() -> None:
    asked = "you want to know"
    questions = pd.read_json(DATA / "questions.json").set_index(asked)
    for question, answer in questions.iterrows():
        show(answer.to_frame(question).rename_axis(asked))
    texts = {name: (one.__doc__ or "").split("\n\n")[0] for name, one in METHODS.items()}
    meanings = {name: " ".join(text.split()) for name, text in texts.items()}
    show(pd.DataFrame({"score of a neuron": meanings}).rename_axis("method"))


def preview(text: str) -> Text:
    """How a text begins, in one line of a table."""
    start = text[:PREVIEW] + "..." * (len(text) > PREVIEW)
    return Text(start.replace("\n", BREAK), no_wrap=True, overflow="ellipsis")


def show_known(given: Namespace) -> None:
    check_between(0, 1, min_accuracy=given.min_accuracy)
    model = load(given)
    found = known(model, given.min_accuracy, own_data(given))
    if given.out:
        found.save(given.out)
        say(f"Use them: tl-localize del --model {given.model} --data {given.out}")
    shown = found.frame.set_index("id").round({"accuracy": 2})
    shown = shown.assign(text=[preview(text) for text in shown["text"]])
    if console().width < WIDE:  # ids are what is copied: they are not to be cut
        shown = shown.drop(columns="category")
    is_own, is_known = shown["kind"] == OWN, found.frame["accuracy"] >= given.min_accuracy
    own, others = shown[is_own], shown[~is_own & is_known.to_numpy()]
    if len(own):
        show(own, "Your own texts, whatever their accuracy:")
    if len(others):
        show(others, f"Texts that the model recites with {given.min_accuracy:g} or more:")
    show(found.by_category().round(2), "By what must be known:")
    show(found.kept().to_frame(), "What a threshold keeps:")
    say(f"{found}. {found.advice()}")
