"""tl-localize known | methods: what there is."""

from argparse import Namespace

import pandas as pd

from tl_localize.cli.running import load, own_data, say
from tl_localize.methods import METHODS
from tl_localize.report.terminal import show
from tl_localize.texts.known import known
from tl_localize.texts.reference import DATA


def list_methods() -> None:
    asked = "you want to know"
    questions = pd.read_json(DATA / "questions.json").set_index(asked)
    for question, answer in questions.iterrows():
        show(answer.to_frame(question).rename_axis(asked))
    texts = {name: (one.__doc__ or "").split("\n\n")[0] for name, one in METHODS.items()}
    meanings = {name: " ".join(text.split()) for name, text in texts.items()}
    show(pd.DataFrame({"score of a neuron": meanings}).rename_axis("method"))


def show_known(given: Namespace) -> None:
    model = load(given)
    found = known(model, given.min_accuracy, own_data(given))
    if given.out:
        found.save(given.out)
        say(f"Use them: tl-localize del --model {given.model} --data {given.out}")
    shown = found.frame.query(f"accuracy >= {given.min_accuracy}")
    if len(shown):
        show(shown.set_index("id").round(2))
    show(found.by_category().round(2), "By what must be known:")
    show(found.kept().to_frame(), "What a threshold keeps:")
    say(f"{found}. {found.advice()}")
