"""Pages of HTML to send to others, of a command or of a results folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tl_localize.cli.messages import COMMAND, say
from tl_localize.evals.shared import Measured
from tl_localize.execution import Store
from tl_localize.files import write_text
from tl_localize.model.environment import environment
from tl_localize.model.neurons import LanguageModel
from tl_localize.paper import short_title
from tl_localize.report.pages import PageTable, Shown, in_words, page
from tl_localize.stats import quantity

LONG = 300  # characters of a method's settings; measured_with.json has all of them
SOME = 20  # ids of texts that the head of a page has room for
# settings that stand elsewhere on a page, or that only a program reads
APART = ("model", "fingerprint", "probe")


def write_page(file: Path, parts: Sequence[Shown], title: str, about: Mapping[str, str]) -> None:
    """Write a page, whole or not at all, and say where it is."""
    write_text(file, page(parts, title, about))
    say(f"A page to send to others: {file}")


def about_command(model: LanguageModel) -> dict[str, str]:
    """What a command that is not a run was made with, for the head of its page."""
    return {"made with": in_words(environment(model)), "command": COMMAND.get()}


def about_results(results: Measured, store: Store) -> dict[str, str]:
    """What a results folder is of, for the head of its page."""
    settings = store.settings
    assert settings is not None  # a folder that is published has them
    frames = [results.frame, getattr(results, "single_layers", results.frame)]
    ids = list(dict.fromkeys(str(id) for frame in frames for id in frame.get("sequence_id", ())))
    about = {"model": str(settings.settings["model"]), "measured": quantity(len(ids), "text")}
    about["texts"] = ", ".join(ids[:SOME])
    if len(ids) > SOME:
        about["texts"] += f" and {len(ids) - SOME} more"
    if len(results.missing):
        about["missing"] = f"{quantity(len(results.missing), 'result')} that were asked for"
    shared = {name: value for name, value in settings.settings.items() if name not in APART}
    about["settings"] = in_words(shared)
    for name, scope in settings.scopes.items():
        about[f"settings at {name}"] = in_words(scope.settings)
    about["made with"] = "; ".join(map(in_words, settings.environments))
    about["command"] = "\n".join(settings.commands)
    return about


def methods_table(store: Store) -> PageTable:
    """The methods of a results folder with their settings, and how many sentences, groups or
    targets each was asked about.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for scope, asked in (store.settings.scopes if store.settings else {}).items():
        for label, (method, n_parts) in asked.methods.items():
            text = in_words(method)
            shown = text if len(text) <= LONG else f"{text[:LONG]}..."
            rows[scope, short_title(label)] = {"settings": shown, "asked": n_parts}
    index = pd.MultiIndex.from_tuples(rows, names=["setting", "method"])
    return PageTable(pd.DataFrame(list(rows.values()), index=index), "Methods and their settings")
