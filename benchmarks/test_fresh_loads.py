"""The first numbers of a fresh process: 200 processes load a GPT-2 directory on two threads, none
is refused, none is off.

    pytest benchmarks/test_fresh_loads.py -s                # about 20 minutes on two cores
    pytest benchmarks/test_fresh_loads.py -s --processes 20

Without ``initialize_vector_functions`` about one process in forty gets logits that are off by 1e-4
(docs/differences.md).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, torch
torch.set_num_threads(2)
from importlib.resources import files
from tl_localize import load_model
model = load_model(files("tl_localize") / "data" / "reference-gpt2", device="cpu")
tokens = torch.arange(64)[None] * 7919 % model.cfg.d_vocab
with torch.no_grad():
    first, second = model(tokens), model(tokens)
print(float((first - second).abs().max()))
"""


@pytest.mark.slow
def test_no_fresh_process_is_refused_or_off(request):
    n = request.config.getoption("--processes")
    failures = []
    for i in range(n):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
        if done.returncode or float(done.stdout.split()[-1]):
            failures.append((i, done.stdout[-200:] + done.stderr[-400:]))
        print(f"{i + 1} of {n} processes, {len(failures)} wrong", flush=True)
    assert not failures, failures
