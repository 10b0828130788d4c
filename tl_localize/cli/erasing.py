"""tl-localize erase: a model that no longer recites some texts, as a folder that others load."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tl_localize.cli.command_options import EraseOptions
from tl_localize.cli.messages import command, say, say_next
from tl_localize.cli.one_text import check_one_text
from tl_localize.cli.options import ColumnOptions, SequenceOptions
from tl_localize.cli.pages import about_command, write_page
from tl_localize.erasure import Erasure, erase
from tl_localize.erasure.directory import check_new_folder
from tl_localize.erasure.erase import DEFAULT_METHODS, check_training
from tl_localize.evals.settings import (
    FIRST_LAYER,
    collected_text,
    first_layer_settings,
    make_methods,
    sparing_layers,
)
from tl_localize.evals.shared import reporter
from tl_localize.execution import Steps
from tl_localize.execution.run import show_progress
from tl_localize.files import check_writable
from tl_localize.methods import Localizer
from tl_localize.metrics import predicted_suffixes
from tl_localize.model.loading import is_reference
from tl_localize.model.neurons import LanguageModel
from tl_localize.report.pages import PageTable, Shown, in_words
from tl_localize.report.terminal import bars, show
from tl_localize.report.token_view import TokenView
from tl_localize.sequences import MemorizedSequence, decoder
from tl_localize.stats import quantity
from tl_localize.texts.known import example
from tl_localize.texts.readers import Data, read_tokens

CHANGE = "length of the change of a row (mean)"
VIEWS = 8  # texts that a page shows token by token


def erase_texts(options: EraseOptions) -> None:
    # mistakes are found before the model is loaded
    method = read_method(options)
    check_options(options)
    model = options.model.load()
    if method is not None:
        (method,) = sparing_layers([method], model)
    texts = read_texts(options, model)
    others = None
    if options.others:
        data = others_of(options.others, options.texts.columns)
        others = list(data.sequences(model, third_of_short=True))
    general = options.general or collected_text(options.texts.data)
    steps = Steps()  # in memory: it has the bar of runs
    with show_progress(steps, 1, True):
        erasure = erase(
            model,
            texts,
            edit=options.edit,
            method=method,
            others=others,
            general_tokens=read_tokens(general) if general else None,
            share=options.share,
            max_recited=options.max_recited,
            max_others_lost=options.max_others_lost,
            max_perplexity_rise=options.max_perplexity_rise,
            learning_rate=options.learning_rate,
            max_steps=options.max_steps,
            seed=options.seed,
            check=not options.force,
            progress=reporter(steps, "erase"),
        )
    show_erasure(erasure)
    if not (erasure.within_price or options.force):
        raise ValueError(
            "price must be one that an edit can keep, got --max-others-lost "
            f"{options.max_others_lost:g} and --max-perplexity-rise "
            f"{options.max_perplexity_rise:g}, where the smallest edit, of "
            f"{quantity(len(erasure.neurons), 'row')}, costs more: {erasure.watched}. Nothing is "
            "written. Allow more, or write it all the same with --force."
        )
    if options.out is None:
        say_next("give --out FOLDER to write the edited model, which transformers loads.")
    else:
        write_erasure(erasure, model, texts, options, options.out)
    if erasure.missed:
        sys.exit(1)


def write_erasure(
    erasure: Erasure,
    model: LanguageModel,
    texts: list[MemorizedSequence],
    options: EraseOptions,
    out: Path,
) -> None:
    """Write the edited model and its page, and say how to look at it."""
    erasure.save(out, force=options.force)
    say(f"Edited model: {out}; what was done: {out / 'erased.md'}")
    write_erased_page(out / "erased.html", erasure, model, texts, options)
    if options.example:
        look = command("localize", "--model", out, "--example", options.example, "--force")
        say_next(f"{look} shows what is left of the text.")
    else:
        data = options.texts.data
        again: tuple[str | Path, ...] = ()
        if data and options.texts == SequenceOptions(data=data):  # known reads it in no other way
            again = ("--data", data)
        known = command("known", "--model", out, *again)
        say_next(f"{known} lists what it still recites.")


def read_method(options: EraseOptions) -> Localizer | None:
    """The method that is asked for, or set; None for the default one as it is."""
    if not (options.method or options.set):
        return None
    name = options.method or DEFAULT_METHODS[options.edit].name
    methods = make_methods(name, options.set, first_layer_settings(FIRST_LAYER))
    if len(methods) != 1:
        raise ValueError(
            f"method must be one, got {options.method!r}. Give the command once for each."
        )
    return methods[0]


def check_options(options: EraseOptions) -> None:
    """Raise ValueError where an option is wrong; no model is loaded."""
    check_training(options.edit, options.share, options.learning_rate, options.max_steps)
    texts_of(options)
    data = {"--data": options.texts.data is not None}
    check_one_text(options.model.model, options.example, options.prefix, options.suffix, data)
    if options.out:
        if is_reference(options.out):
            raise ValueError(
                f"out must not be the name of a shipped model, got {str(options.out)!r}. Choose "
                "another one."
            )
        check_new_folder(options.out)
        check_writable(options.out.parent)


def texts_of(options: EraseOptions) -> Data | None:
    """The data of the texts that are to be erased, where they are given; the columns may be named
    for the other texts alone.
    """
    texts = options.texts
    if options.others and not texts.data:
        texts = replace(texts, columns=ColumnOptions())
    return texts.read()


def others_of(path: Path, columns: ColumnOptions) -> Data:
    """The data of the other texts, with the columns that are named where its first row has them."""
    data = columns.open(path)
    try:
        next(data.entries(), None)
    except ValueError:  # those columns may be of the erased texts alone
        return Data(source=path)
    return data


def read_texts(options: EraseOptions, model: LanguageModel) -> list[MemorizedSequence]:
    """The texts that are to be erased."""
    data = texts_of(options)
    if data:
        return list(data.sequences(model, third_of_short=True))
    if options.example:
        return [example(model, options.example)]
    return [MemorizedSequence.from_text(model, options.prefix, options.suffix)]


def show_erasure(erasure: Erasure) -> None:
    """What the edit is, and what it does to the texts and to other text."""
    settings = erasure.settings
    layers = erasure.neurons.mask.any(1).nonzero().flatten().tolist()
    done = "set to zero" if settings["edit"] == "ablate" else "trained"
    print(
        f"{quantity(len(erasure.neurons), 'row')} of W_out in layers {layers[0]} to {layers[-1]} "
        f"were {done}, and no other weight was changed."
    )
    show(changes_by_layer(erasure), "What was changed, by layer:")
    show(erasure.table(), "Before and after:")
    if erasure.missed:
        more = ", more --max-steps, another --share or a smaller --learning-rate"
        more = "" if settings["edit"] == "ablate" else more
        say(f"{erasure.missed} Allow a higher price{more}.")


def changes_by_layer(erasure: Erasure) -> pd.DataFrame:
    """Of each layer that was edited how many rows, and how far they are from what they were."""
    layers, _ = erasure.neurons.mask.nonzero().numpy().T
    moved = (erasure.edit.rows - erasure.edit.old_rows).norm(dim=1)
    lengths = pd.Series(moved.numpy()).groupby(pd.Series(layers, name="layer"))
    table = pd.DataFrame({"rows": lengths.size(), CHANGE: lengths.mean()})
    return table.assign(**{"": bars(table[CHANGE])})


def write_erased_page(
    file: Path,
    erasure: Erasure,
    model: LanguageModel,
    texts: list[MemorizedSequence],
    options: EraseOptions,
) -> None:
    """The page beside the edited model: what was asked, what it cost, and what is left of each
    text.
    """
    name = options.model.model
    parts: list[Shown] = [PageTable(erasure.table().round(4), "Before and after")]
    parts.append(PageTable(changes_by_layer(erasure), "What was changed, by layer"))
    parts.append(PageTable(losses_of(erasure), "The erased texts, in percent of the suffix"))
    if getattr(model, "tokenizer", None) is not None:
        parts += views_of(erasure, model, texts[:VIEWS])
    about = {"in short": erasure.missed, "model": name}
    about |= {"texts": quantity(len(texts), "text"), "price": str(erasure.price)}
    about["settings"] = in_words(erasure.settings)
    about |= about_command(model)
    write_page(file, parts, f"{Path(name).name} {erasure.title}", about)


def losses_of(erasure: Erasure) -> pd.DataFrame:
    """How much of each erased text is recited before and after."""
    before, after = erasure.texts["before"], erasure.texts["after"]
    table = before[["id", "category"]].assign(before=before["accuracy"], after=after["accuracy"])
    table[["before", "after"]] = (100 * table[["before", "after"]]).round(1)
    return table.set_index("id")


def views_of(
    erasure: Erasure, model: LanguageModel, texts: list[MemorizedSequence]
) -> list[TokenView]:
    """Texts token by token, before and after the edit."""
    before = predicted_suffixes(model, texts)
    with erasure.applied(model):
        after = predicted_suffixes(model, texts)
    how = (decoder(model), len(erasure.edit.rows), "row", "changed")
    return [
        TokenView(text, was, now, *how) for text, was, now in zip(texts, before, after, strict=True)
    ]
