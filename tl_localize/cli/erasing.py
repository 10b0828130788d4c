"""tl-localize erase: a model that no longer recites some texts, as a folder that others load."""

import torch

from tl_localize.checks import check_ratio
from tl_localize.cli.command_options import EraseOptions
from tl_localize.cli.messages import say, say_next
from tl_localize.erasure import Erasure, erase
from tl_localize.erasure.directory import check_new_folder
from tl_localize.evals.settings import make_methods
from tl_localize.evals.shared import reporter
from tl_localize.execution import Steps
from tl_localize.execution.run import show_progress
from tl_localize.files import check_writable
from tl_localize.methods import Localizer
from tl_localize.model.neurons import LanguageModel
from tl_localize.report.terminal import show
from tl_localize.sequences import MemorizedSequence
from tl_localize.stats import quantity
from tl_localize.texts.known import check_example, example, first_example


def erase_texts(options: EraseOptions) -> None:
    # mistakes are found before the model is loaded
    method = read_method(options)
    check_options(options)
    model = options.model.load()
    texts = read_texts(options, model)
    others = None
    if options.others:
        found = options.texts.columns.open(options.others, options.texts.n_prefix)
        others = list(found.sequences(model, third_of_short=True))
    steps = Steps()  # in memory: it has the bar of runs
    with show_progress(steps, 1, True):
        erasure = erase(
            model,
            texts,
            edit=options.edit,
            method=method,
            others=others,
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
            f"{quantity(len(erasure.neurons), 'row')}, costs more: {erasure.price}. Nothing is "
            "written. Allow more, or write it all the same with --force."
        )
    if options.out is None:
        say_next("give --out FOLDER to write the edited model, which transformers loads.")
        return
    erasure.save(options.out, force=options.force)
    say(f"Edited model: {options.out}; what was done: {options.out / 'erased.md'}")
    say_next(f"tl-localize known --model {options.out} lists what it still recites.")


def read_method(options: EraseOptions) -> Localizer | None:
    """The method that is asked for; None for the default one."""
    if not options.method:
        return None
    methods = make_methods(options.method, options.set)
    if len(methods) != 1:
        raise ValueError(
            f"method must be one, got {options.method!r}. Give the command once for each."
        )
    return methods[0]


def check_options(options: EraseOptions) -> None:
    """Raise ValueError where an option is wrong; no model is loaded."""
    name = options.model.model
    check_ratio("share", options.share)
    given = [bool(options.texts.data), bool(options.example)]
    given.append(bool(options.prefix and options.suffix))
    if sum(given) != 1:
        raise ValueError(
            "text must be given in one way, as --data, as --example or as --prefix and --suffix, "
            f"got {sum(given)}. Try --example {first_example(name)}, or another text that "
            f"tl-localize known --model {name} lists."
        )
    if options.example:
        check_example(options.example, name)
    if options.out:
        check_new_folder(options.out)
        check_writable(options.out.parent)


def read_texts(options: EraseOptions, model: LanguageModel) -> list[MemorizedSequence]:
    """The texts that are to be erased."""
    data = options.texts.read()
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
    show(erasure.table().round(3), "Before and after:")
    frame = torch.tensor(erasure.texts["after"]["accuracy"].tolist())
    if float(frame.mean()) > settings["max_recited"]:
        say(
            f"The texts are not erased: {frame.mean():.0%} of the tokens are recited, and "
            f"{settings['max_recited']:.0%} was asked for. Allow a higher price, more --max-steps "
            "or another --share."
        )
