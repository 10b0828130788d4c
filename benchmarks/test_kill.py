"""The kill test, long form: INJ and REV killed (SIGKILL) at 60 random moments and resumed, against
an undisturbed run.

A tiny random model on the CPU; the figures are printed:

    pytest benchmarks/test_kill.py -s
    ROUNDS=9 pytest benchmarks/test_kill.py -s    # a quick one
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

ROUNDS = int(os.environ.get("ROUNDS", "60"))
SHARE = 1 / 12  # of the CPU time of an undisturbed run: the time to the kill, on average
N_SENTENCES = 16

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("which", ["inj", "distractors", "rev"])
def test_killed_run_has_the_tables_of_an_undisturbed_one(tmp_path, which):
    from folders import files_of, leftovers
    from kill import kill_until, log_writes

    from tl_localize import Activations, HardConcrete, IntegratedGradients
    from tl_localize.evals.inj import inj_tables
    from tl_localize.execution import Store
    from tl_localize.report.saving import to_markdown

    torch.set_num_threads(1)
    helpers = runpy.run_path(str(TESTS / "conftest.py"))
    model = helpers["tiny_model"](1, model_name="tiny")
    sentences = helpers["memorized"](*[(10 + i % 5, 1) for i in range(N_SENTENCES)])
    methods = [Activations(), IntegratedGradients(steps=5), HardConcrete(steps=30)]

    if which == "rev":
        benchmark = helpers["tiny_rev"](model)
    else:
        benchmark = helpers["tiny_inj"](
            model,
            sequences=sentences,
            learning_rate=0.02,
            stop_loss=0.2,
            max_steps=100,
            distractors=int(which == "distractors"),
        )

    def finish(name):
        return benchmark.run(methods, Store(tmp_path / name))

    def tables(results):
        assert not len(results.missing)
        if which == "rev":
            return [results.frame.to_csv(), to_markdown(results.table())]
        frame = results.frame.drop(columns="seconds").to_csv()
        return [
            frame,
            *(to_markdown(table) for table in inj_tables(results, "tiny").values()),
        ]

    began = time.process_time()
    whole = finish("whole")
    n_steps = len(files_of(tmp_path / "whole"))
    mean = SHARE * (time.process_time() - began)
    kills = inside = n_folders = 0
    while kills < ROUNDS:
        name = f"killed-{n_folders}"
        n_folders += 1
        log = tmp_path / f"{name}.log"

        def run(name=name, log=log):
            log_writes(log)
            finish(name)

        seen = kill_until(run, tmp_path / name, log, ROUNDS - kills, seed=n_folders, mean=mean)
        kills += seen.rounds
        inside += seen.inside_writes
        assert set(seen.written.values()) == {1}
        assert tables(finish(name)) == tables(whole)
        for path in (tmp_path / name / "tmp").iterdir():  # what was being written
            path.unlink()
        assert leftovers(tmp_path / name) == []
        files = [
            {path.relative_to(tmp_path / folder) for path in files_of(tmp_path / folder)}
            for folder in (name, "whole")
        ]
        assert files[0] == files[1]
    print(
        f"\n{which}: {kills} kills ({inside} inside a write) over {n_folders} runs "
        f"of {n_steps} steps, each of which was written once"
    )
