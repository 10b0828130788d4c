"""A test that hangs fails, says where every thread is, and does not keep the others."""

import os
import subprocess
import sys
from pathlib import Path

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
HANGING = """
import threading

def wait_in_a_thread(lock):
    with lock:
        pass

def test_that_hangs():
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=wait_in_a_thread, args=[lock], daemon=True).start()
    lock.acquire()

def test_after_it():
    pass
"""


def test_every_test_has_a_limit(request):
    assert 0 < float(request.config.getini("faulthandler_timeout")) <= 600
    assert request.config.getini("faulthandler_exit_on_timeout") is True


def test_hanging_test_fails_with_the_stacks_of_all_threads(tmp_path):
    (tmp_path / "test_hang.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", SETTINGS, "--rootdir", tmp_path, tmp_path]
    command += ["-o", "addopts=", "-o", "filterwarnings=", "-n", "1"]
    command += ["-o", "faulthandler_timeout=0.3", "-p", "xdist"]
    result = subprocess.run(
        command,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # they take seconds
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert "in test_that_hangs" in said
    assert "in wait_in_a_thread" in said
    assert "crashed while running 'test_hang.py::test_that_hangs'" in said
    assert "1 failed, 1 passed" in said
