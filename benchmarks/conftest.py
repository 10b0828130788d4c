"""Options, one run per model shared by all tests, and the tables at the end."""

from __future__ import annotations

import faulthandler
import platform
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from comparison import (
    MEASURED,
    by_levels,
    differences,
    indexed,
    names,
    read_bands,
    read_frame,
    rows_measured,
    write_frame,
)
from del_data import folder_of
from kept import EDITS, EXPECTED, bring, write_files

HERE = Path(__file__).parent
REFERENCE_MODELS = ["reference-gpt2", "reference-pythia"]
# seconds
TIME_LIMIT, SMOKE_TIME_LIMIT = 7 * 24 * 3600, 1800
# of --quick: they need seconds
QUICK_METHODS = "activations,attribution,gradient_alignment,iterative_attribution"
OWN_TEXTS = ("--settings", "--data", "--del-data", "--general")
TABLES, PAGES = pytest.StashKey[dict](), pytest.StashKey[dict]()


def pytest_addoption(parser):
    group = parser.getgroup("tl_localize benchmarks")
    group.addoption(
        "--model",
        action="append",
        help="model to measure, may be given many times (default: both reference models)",
    )
    group.addoption(
        "--shape",
        action="append",
        help="cost table: random weights of a known shape, such as gpt2 or pythia-6.9b",
    )
    group.addoption("--device", default=None, help="such as cuda (default: CUDA when there is one)")
    group.addoption("--dtype", default="float32", help="float32, bfloat16 or float16")
    group.addoption(
        "--data", default=None, help="INJ sentences, ECBD-style JSONL (default: our own)"
    )
    group.addoption(
        "--del-data",
        default=None,
        help="DEL sequences, as --data of tl-localize del (default: collected)",
    )
    group.addoption("--general", default=None, help="DEL: tokens [sequence pos] for the perplexity")
    group.addoption(
        "--settings",
        default=None,
        help="settings file of tl-localize tune, over the paper's settings and the defaults",
    )
    group.addoption("--limit", type=int, default=None, help="number of sentences or sequences")
    group.addoption(
        "--full",
        action="store_true",
        help="more sentences of INJ; with distractors all groups and methods: hours",
    )
    group.addoption(
        "--quick",
        action="store_true",
        help="some rows of the committed DEL, INJ and REV, measured anew, in minutes",
    )
    group.addoption("--processes", type=int, default=200, help="fresh processes that load a model")
    group.addoption(
        "--results", default=str(HERE / "results"), help="folder that the tables are written to"
    )
    group.addoption(
        "--compare",
        action="store_true",
        help="print each number that differs from the committed one beyond its tolerance",
    )
    group.addoption(
        "--real",
        action="store_true",
        help="the paper's tables on real models, and nothing else: see benchmarks/real/PLAN.md",
    )
    group.addoption(
        "--paper-data", default=None, help="folder of the paper's data, with ecbd/ and manual/"
    )
    group.addoption(
        "--shard", type=shard, default=(1, 1), help="such as 2/3, the second of three parts"
    )
    group.addoption(
        "--rehearse",
        action="store_true",
        help="with --real: two short texts and two steps of each mask, in seconds",
    )
    group.addoption(
        "--anew",
        action="store_true",
        help="with --real, or for the edits of test_erase*.py: measure what other machines have "
        "measured too, to compare with it",
    )
    group.addoption(
        "--update-expected",
        action="store_true",
        help="commit what this run measured as the expected numbers",
    )


def shard(text):
    """(i, n) of i/n."""
    index, _, count = text.partition("/")
    return int(index), int(count)


def pytest_configure(config):
    config.stash[TABLES], config.stash[PAGES] = {}, {}
    own = [name for name in OWN_TEXTS if config.getoption(name)]
    if config.getoption("--real") and config.getoption("--paper-data") and own:
        raise pytest.UsageError(
            f"{own[0]} must be left out with --real --paper-data, whose texts and settings are "
            "those of benchmarks/real/PLAN.md."
        )
    whole = config.getoption("--shard") == (1, 1)
    if not whole and not config.getoption("--real"):
        raise pytest.UsageError("--shard must be given with --real: nothing else is divided.")
    if (config.getoption("--rehearse") or not whole) and not config.getoption("--paper-data"):
        raise pytest.UsageError(
            "--rehearse and --shard must be given with --paper-data: texts of your own are few."
        )


def pytest_itemcollected(item):
    is_smoke = item.get_closest_marker("smoke") is not None
    item.add_marker(pytest.mark.timeout(SMOKE_TIME_LIMIT if is_smoke else TIME_LIMIT))


def pytest_collection_modifyitems(config, items):
    """With --real nothing else runs, and no rehearsal; with --quick what is marked so."""
    others = []
    if config.getoption("--real"):
        others = [
            item
            for item in items
            if HERE / "real" not in item.path.parents or item.get_closest_marker("smoke")
        ]
    elif config.getoption("--quick"):
        others = [item for item in items if not item.get_closest_marker("quick")]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    faulthandler.cancel_dump_traceback_later()  # the limit of the tests


def pytest_generate_tests(metafunc):
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize(
            "model_name", metafunc.config.getoption("--model") or REFERENCE_MODELS, scope="session"
        )


@pytest.fixture(scope="session")
def model(model_name, request):
    from tl_localize import load_model

    return load_model(
        model_name,
        request.config.getoption("--device"),
        getattr(torch, request.config.getoption("--dtype")),
    )


@pytest.fixture(scope="session")
def edit_steps(model_name, request):
    """Where the edits of a model are kept; on a pretrained one a run begins with what other
    machines have measured.
    """
    from tl_localize.execution import Store

    folder = folder_of(request, model_name, "erase")
    archive = EXPECTED / Path(model_name).stem / EDITS
    is_own = folder.name == "erase"  # not of data that the user named
    if is_own and not request.config.getoption("--anew"):
        bring(archive, folder)
    yield Store(folder)
    if is_own and archive.parent.is_dir() and request.config.getoption("--update-expected"):
        bring(archive, folder)  # what this run has not measured
        write_files(sorted(folder.glob("steps/*/[!.]*")), folder, archive)


@pytest.fixture(scope="session")
def alone():
    """How a bash command is run where Ray can listen on loopback addresses only: a network
    namespace that has nothing else.
    """
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "bash",
        "-c",
    ]
    up = "ip link set lo up"
    try:
        allowed = (
            sys.platform == "linux"
            and not subprocess.run([*command, up], capture_output=True, check=False).returncode
        )
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip(
            "network namespaces are not allowed here, and without one Ray would listen on the "
            "machine's own address"
        )
    return lambda line: [*command, f"{up} && exec {line}"]


@pytest.fixture(scope="session")
def tuned(request):
    """Settings by method name, of the file that the user named."""
    from tl_localize.evals.tuning import read_settings

    path = request.config.getoption("--settings")
    return read_settings(path) if path else {}


@pytest.fixture(scope="session")
def quick(request):
    """A benchmark's methods and number of texts, or of trained models; with --quick few."""
    asked = request.config.getoption("--quick")
    return lambda methods, n, few: (QUICK_METHODS, few) if asked else (methods, n)


@pytest.fixture(scope="session")
def publish(request):
    """Write a table to the results folder and print it at the end of the run."""
    from tl_localize.report.saving import save_table, to_markdown

    def show(table, model_name, name, caption):
        short = Path(model_name).name
        save_table(table, Path(request.config.getoption("--results")) / short, name, caption)
        request.config.stash[TABLES][f"{caption} [{model_name}]"] = to_markdown(table)
        request.config.stash[PAGES].setdefault(short, []).append(
            f"## {caption}\n\n{to_markdown(table)}\n"
        )

    return show


@pytest.fixture(scope="session")
def publish_figure(request):
    """Write a figure to the results folder."""
    from tl_localize.report.saving import save_figure

    def show(figure, model_name, name):
        short = Path(model_name).name
        save_figure(figure, Path(request.config.getoption("--results")) / short, name)
        request.config.stash[PAGES].setdefault(short, []).append(f"![{name}]({short}/{name}.png)\n")

    return show


@pytest.fixture(scope="session")
def committed(request):
    """Compare a frame with the committed one of a name, row by row (see comparison.py); skipped
    where one of some options, or another precision, was given. With --quick the rows are compared
    that were measured. The frame of committed data goes to the results folder too, from which
    ``measure_bands.py`` reads it.
    """
    quick = request.config.getoption("--quick")

    def check(measured, name, *options):
        name = name.replace("/", "-")  # of a model's address
        changed = {option for option in options if request.config.getoption(option)}
        if request.config.getoption("--dtype") != "float32":
            changed.add("--dtype")
        if changed <= {"--limit"}:
            folder = Path(request.config.getoption("--results")) / MEASURED
            write_frame(indexed(measured), name, folder)
        given = bool(changed)
        if request.config.getoption("--update-expected") and not (given or quick):
            write_frame(indexed(measured), name)
        if given or name not in names():
            pytest.skip(f"nothing is committed of {name} with these options")
        expected = read_frame(name)
        if quick:
            expected = rows_measured(expected, indexed(measured))
            assert len(expected)
        same = by_levels(indexed(measured), expected)
        wrong = differences(same, expected, read_bands(name))
        if request.config.getoption("--compare"):
            caption = f"{name}: {len(wrong)} of {expected.size} numbers are not the committed ones"
            request.config.stash[TABLES][caption] = wrong.to_string() if len(wrong) else ""
        assert wrong.empty, f"\n{wrong.to_string()}"

    return check


def pytest_terminal_summary(terminalreporter):
    import torch

    config = terminalreporter.config
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    made = (
        f"By `pytest {shlex.join(config.invocation_params.args)}`: {device}, "
        f"{torch.get_num_threads()} threads, "
        f"{versions}.\n"
    )
    counts = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed")}
    spent = f"{time.process_time() / 60:.1f} minutes of processor time"
    made += f"Tests: {counts['passed']} passed, {counts['failed']} failed, in {spent}.\n"
    terminalreporter.write_line(spent)
    for name, parts in config.stash[PAGES].items():
        page = Path(config.getoption("--results")) / f"{name}.md"
        page.write_text("\n".join([f"# {name}\n", made, *parts]), encoding="utf-8")
    for caption, text in terminalreporter.config.stash[TABLES].items():
        terminalreporter.section(caption)
        terminalreporter.write_line(text)
