"""Every option of every command with values that it can't take: an error in one line and exit code
2, never a traceback.
"""

import click
import pytest
import typer
from typer.testing import CliRunner

from tl_localize.cli import PANELS, app

BAD = ["", "\udcff", "nan", "-1", "\x00"]
# as of del
SHARED = {"model", "device", "dtype", "units", "set", "out", "ray", "shard", "seed", "key", "id"}
SHARED |= {"category", "general", "methods", "settings", "verbose", "csv"}
NAMES = [
    name
    for group in PANELS.values()
    for name in group
    if name not in ("methods", "models", "texts", "demo")
]


class Reached(Exception):
    """The options were fine, and a model would be loaded."""


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_an_option_can_not_take_is_an_error_and_no_traceback(
    name, tmp_path, monkeypatch
):
    def reached(*_):
        raise Reached

    for file in ("running", "one_text"):
        monkeypatch.setattr(f"tl_localize.cli.{file}.load_model", reached)
    monkeypatch.chdir(tmp_path)
    root = typer.main.get_command(app)
    command = root.get_command(click.Context(root), name)
    rest = {"--out": str(tmp_path / "out")} if name in ("inj", "del", "collect", "tune") else {}
    rest |= {"--example": "quotes-056"} if name == "localize" else {}
    for option in command.params:
        if getattr(option, "is_flag", False) or (name != "del" and option.name in SHARED):
            continue
        for value in BAD:
            given = [value] if option.param_type_name == "argument" else [option.opts[0], value]
            others = [
                part for key, text in rest.items() if key not in option.opts for part in (key, text)
            ]
            result = CliRunner().invoke(app, [name, *given, *others])
            error = result.exception
            assert error is None or isinstance(error, SystemExit | Reached), (given, error)
            if isinstance(error, SystemExit):
                assert result.exit_code in (0, 2), (given, result.stderr)
