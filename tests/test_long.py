"""Long texts: memory that does not grow with l^2, and the time of a whole context."""

import json
import subprocess
import sys
import time

import pytest

from lapa2_interp.models.load import load_transformers

CODE = """
import json, resource, sys, time
import numpy as np
from lapa2_interp import Augmentation, load_model
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.bias.layout import Layout

model = load_model(sys.argv[1], dtype=sys.argv[2], device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
began, shares, steps = time.perf_counter(), [], []
for n, alpha in json.loads(sys.argv[3]):
    text = np.random.default_rng(0).integers(100, model.cfg.d_vocab, n).tolist()
    trace = teacher_forced(model, branch, [text], Augmentation(alpha=alpha) if alpha else None)
    shares.append(float(trace["prefix"][0, 0, -1].mean()))
    steps.append(trace.sizes["step"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": time.perf_counter() - began, "peak": peak / 2**20, "grown": (peak - before) / 2**20,
                  "shares": shares, "steps": steps}))
"""


def measure(model, dtype, *texts):
    """Read texts of given lengths, each under an alpha, in a process of their own."""
    asked = [sys.executable, "-c", CODE, str(model), dtype, json.dumps(texts)]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_memory_of_a_long_text(tmp_path):
    """A whole [head, query, key] pattern of 3,000 tokens in float32 is 0.13 GiB a layer; several
    copies of it would be seen."""
    network, tokenizer, _ = load_transformers("tiny-llama")
    tokenizer.save_pretrained(tmp_path)
    network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = 4096
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    measured = measure(tmp_path, "float32", (256, 0.0), (256, 0.5), (3000, 0.5))
    assert measured["steps"] == [256, 256, 3000]
    assert measured["grown"] < 0.3
    assert measured["shares"][0] < measured["shares"][1]


@pytest.mark.slow
def test_the_whole_context_in_five_minutes_and_four_gigabytes():
    began = time.perf_counter()
    measured = measure(
        "smollm2-135m", "bfloat16", *((8192 - 6, alpha) for alpha in (0.0, 0.5, 1.0))
    )
    assert measured["peak"] < 4.0
    assert time.perf_counter() - began < 300
    assert measured["shares"][0] < measured["shares"][1] < measured["shares"][2]
