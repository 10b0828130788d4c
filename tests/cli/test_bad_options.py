"""Every option of every command with values that it can't take: an error in one line and exit code
2, never a traceback.
"""

import pytest
from commands import invoke

from tl_localize.cli import app

BAD = ["", "\udcff", "nan", "-1", "\x00"]
# as of del
SHARED = {"model", "device", "dtype", "units", "set", "out", "ray", "shard", "seed", "key", "id"}
SHARED |= {"category", "general", "methods", "settings", "verbose"}
NAMES = ["localize", "known", "erase", "inj", "del", "rev", "tune", "collect", "status", "table"]


class Reached(Exception):
    """The options were fine, and a model would be loaded."""


def options_of(name):
    """The options of a command by name, without those that take no value, and those of del alone
    where they are the same; the argument of a command is ``""``.
    """
    found = []
    for argument in app[name].assemble_argument_collection():
        option = argument.name.lstrip("-")
        if argument.parse and not argument.children and argument.hint is not bool:
            if option.islower() and (name == "del" or option.replace("-", "_") not in SHARED):
                found.append(option)
            elif option.isupper():
                found.append("")
    return found


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in NAMES for option in options_of(name)]
)
def test_a_value_that_an_option_can_not_take_is_an_error_and_no_traceback(
    name, option, tmp_path, monkeypatch
):
    def reached(*_):
        raise Reached

    monkeypatch.setattr("tl_localize.model.loading.load_model", reached)
    monkeypatch.chdir(tmp_path)
    others = {"out": str(tmp_path / "out")} if name in ("inj", "del", "collect", "tune") else {}
    others |= {"example": "quotes-056"} if name in ("localize", "erase") else {}
    rest = [part for key, text in others.items() if key != option for part in (f"--{key}", text)]
    for value in BAD:
        given = [f"--{option}", value] if option else [value]
        try:
            result = invoke([name, *given, *rest])
        except Reached:
            continue
        assert result.exit_code in (0, 2), (given, result.stderr)
        assert result.exit_code == 0 or len(result.stderr.splitlines()) <= 12, given


def test_every_command_has_options_that_are_tried():
    assert {"max-others-lost", "n-prefix", "shard", "limit"} <= set(options_of("del"))
    assert "before" in options_of("rev")
    assert options_of("status") == [""]


@pytest.mark.parametrize(
    "given",
    [
        "erase --example primes --n-prefix 4",
        "erase --example primes --key body",
        "inj --key body",
        "known --id name",
        "del --n-suffix 3",
        "rev --category kind",
        "tune --method slimming --benchmark del --n-prefix 3",
    ],
)
def test_an_option_of_the_data_needs_the_data(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = given.split("--")[-1].split()[0]
    result = invoke(f"{given} --model nosuch")
    assert result.exit_code == 2 and f"{option} must be given with --data" in result.stderr


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        ("del", "--distractors 3"),
        ("inj", "--n-dev 3"),
        ("inj", "--min-accuracy 0.5"),
        ("inj", "--general ."),
        ("inj", "--n-prefix 3"),
        ("inj", "--n-suffix 3"),
    ],
)
def test_tune_refuses_what_belongs_to_the_other_benchmark(benchmark, option):
    result = invoke(f"tune --method slimming --benchmark {benchmark} {option} --model nosuch")
    name = option.split()[0].strip("-").replace("-", "_")
    assert result.exit_code == 2 and f"{name} must be left out" in result.stderr


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("del --max-others-lost 3 --ratio 0.1", "max_others_lost"),
        ("localize --example primes --max-perplexity-rise 3 --ratio 0.1", "max_perplexity_rise"),
    ],
)
def test_a_share_that_is_given_is_not_chosen(given, name):
    result = invoke(f"{given} --model nosuch")
    said = f"{name} must be left out where --ratio is given, got 3."
    assert result.exit_code == 2 and said in result.stderr


def test_an_edited_model_is_not_named_like_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("erase --example quotes-056 --out reference-gpt2")
    assert result.exit_code == 2 and "must not be the name of a shipped model" in result.stderr


@pytest.mark.parametrize("option", ["--share 0.1", "--learning-rate 0.1", "--max-steps 3"])
def test_ablation_has_no_training(option):
    result = invoke(f"erase --example primes --edit ablate {option} --model nosuch")
    name = option.split()[0].strip("-").replace("-", "_")
    assert result.exit_code == 2 and f"{name} must be left out" in result.stderr


@pytest.mark.parametrize("command", ["localize", "erase"])
def test_a_text_may_begin_with_a_hyphen(command):
    result = invoke(command, "--prefix", "-----BEGIN A", "--suffix", "--force or not")
    assert "must be recited by the model" in result.stderr
