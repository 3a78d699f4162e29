"""Long texts on the bundled model: memory that does not grow with l^2, and the time of a whole
context."""

import json
import subprocess
import sys
import time

import pytest

CODE = """
import json, resource, sys, time
import numpy as np
from lapa2_interp import Augmentation, load_model
from lapa2_interp.decoding.teacher_forcing import teacher_forced
from lapa2_interp.layout import Layout

model = load_model("smollm2-135m", dtype=sys.argv[1], device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
began, shares, steps = time.perf_counter(), [], []
for n, alpha in json.loads(sys.argv[2]):
    text = np.random.default_rng(0).integers(100, 40_000, n).tolist()
    trace = teacher_forced(model, branch, [text], Augmentation(alpha=alpha) if alpha else None)
    shares.append(float(trace["prefix"][0, 0, -1].mean()))
    steps.append(trace.sizes["step"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - began, "peak": peak / 2**20, "grown": (peak - before) / 2**20,
                  "shares": shares, "steps": steps}))
"""


def measure(dtype, *texts):
    """Read texts of given lengths, each under an alpha, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, dtype, json.dumps(texts)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_of_a_long_text():
    """A whole [head, query, key] pattern of 1,024 tokens in float32 is 0.04 GiB a layer; several
    copies of it would be seen."""
    found = measure("float32", (128, 0.0), (128, 0.5), (1024, 0.5))
    assert found["steps"] == [128, 128, 1024]
    assert found["grown"] < 0.6
    assert found["shares"][0] < found["shares"][1]


@pytest.mark.slow
def test_the_whole_context_in_five_minutes_and_four_gigabytes():
    began = time.perf_counter()
    found = measure("bfloat16", *((8192 - 6, alpha) for alpha in (0.0, 0.5, 1.0)))
    assert found["peak"] < 4.0
    assert time.perf_counter() - began < 300
    assert found["shares"][0] < found["shares"][1] < found["shares"][2]
