"""Runs that lose nothing: the units of a piece of work, made one by one into a results folder, and its tables, made from the folder alone.

A plan is what a run was asked for, kept in the folder; ``works`` lists its units without the model. A run makes the units that are
missing. Every unit is computed alone, so that its bits don't depend on what was there before.
"""

from tl_localize.runs.base import Event, Run, Work, stored
from tl_localize.runs.collect_run import CollectRun, Corpus, Search
from tl_localize.runs.del_run import DelRun
from tl_localize.runs.folder import Status, collected, del_results, inj_results, single_layer_frames, status
from tl_localize.runs.inj_run import InjRun

__all__ = [
    "CollectRun",
    "Corpus",
    "DelRun",
    "Event",
    "InjRun",
    "Run",
    "Search",
    "Status",
    "Work",
    "collected",
    "del_results",
    "inj_results",
    "single_layer_frames",
    "status",
    "stored",
]
