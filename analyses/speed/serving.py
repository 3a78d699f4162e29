"""What a server costs beside `generate`, and how many requests it answers.

    python analyses/speed/serving.py --model tiny-llama --texts 20 --at-once 20  # a first look
    python analyses/speed/serving.py --out results/serving

A server of the model runs in a process of its own, and this process is its client. It measures

- overhead: the same prompts continued by `generate` and by the server, one at a time and all
  together, in turns. Tokens per second are of the processor's time of the process that holds the
  model, so that other processes matter little. The ratio is the server's to that of `generate`:
  the median of the turns, the lowest and the highest;
- held: requests that are sent at once, and how many of them are answered;
- memory: the memory of the server, when it has answered so many texts, one after another. The keys
  that it keeps may fill what `--memory` allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from urllib.error import HTTPError

import numpy as np
import pandas as pd
import psutil

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp.files import result_folder
from lapa2_interp.models.facts import Model
from lapa2_interp.models.load import load_model
from lapa2_interp.models.machine import processor_kind
from lapa2_interp.progress import progress_bar
from lapa2_interp.runs.generate import generate

PREFIX = "Speak of the sea:"
WHO = ("old man", "doctor", "captain", "teacher", "child", "farmer", "judge", "cook")
WHAT = ("went home", "opened the letter", "asked for help", "waited at the door")
PROMPTS = [f" The {who} {what} and" for who in WHO for what in WHAT]
LONGEST = 96
"""Tokens of a prompt and its continuation."""


def main(args: Sequence[str] | None = None) -> None:
    options = ScriptOptions(__doc__.splitlines()[0])
    options.add_argument("--model", default="smollm2-135m", help="a model's name or folder")
    options.add_argument(
        "--turns",
        type=whole_number(),
        default=5,
        help="how often both are timed, after one turn that warms up",
    )
    options.add_argument("--rows", type=whole_number(most=32), default=16, help="at a time")
    options.add_argument("--at-once", type=whole_number(), default=200, help="requests")
    options.add_argument("--texts", type=whole_number(), default=1000, help="of the memory")
    options.add_argument("--memory", type=float, default=0.25, help="GB of kept keys")
    options.add_argument("--out", type=Path, default=Path("results/serving"))
    read = options.parse_args(args)
    model = load_model(read.model, model_class="TransformersModel")
    with (
        result_folder(read.out) as folder,
        server(read.model, read.memory) as (address, process),
    ):
        tables = {
            "overhead": overhead(model, address, process, read.rows, read.turns),
            "held": held(address, read.at_once),
            "memory": memory(address, process, read.texts),
        }
        for name, table in tables.items():
            table.insert(0, "model", read.model)
            table.insert(1, "processor", processor_kind())
            table.to_csv(folder / f"{name}.csv", index=False)
            print(f"{name}\n{table.to_string(index=False)}\n")


@contextmanager
def server(model: str, memory: float) -> Iterator[tuple[str, psutil.Process]]:
    """A server of the model: its address, and its process."""
    command = [sys.executable, "-m", "lapa2_interp", "serve", model, "--span", f"phrase:{PREFIX}"]
    command += ["--alpha", "0.5", "--port", "0", "--memory", str(memory), "--name", "served"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().split()[-1], psutil.Process(running.pid)
        finally:
            running.terminate()


def ask(address: str, prompt: str, n_tokens: int, seed: int = 1) -> int:
    """Have a prompt continued by the server; the number of new tokens."""
    body = {"model": "served", "prompt": PREFIX + prompt, "max_tokens": n_tokens, "seed": seed}
    body["lapa2"] = {"top_k": 200}
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def overhead(
    model: Model, address: str, process: psutil.Process, n_rows: int, n_turns: int
) -> pd.DataFrame:
    """Tokens per second of `generate` and of the server."""
    assert model.tokenizer is not None
    lengths = [LONGEST - len(model.tokenizer(prompt).input_ids) for prompt in PROMPTS]

    def of_generate(prompts: Sequence[str], seed: int) -> float:
        begun = process_time()
        run = generate(
            model, prompts, prefix=PREFIX, alpha=0.5, length=LONGEST, eos="stop", trace="none",
            seed=seed,
        )  # fmt: skip
        return int(run.texts()["n_tokens"].sum()) / (process_time() - begun)

    def of_server(prompts: Sequence[str], seed: int) -> float:
        begun = sum(process.cpu_times()[:2])
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(
                pool.map(lambda i: ask(address, prompts[i], lengths[i], seed), range(len(prompts)))
            )
        return sum(counts) / (sum(process.cpu_times()[:2]) - begun)

    rows = []
    with progress_bar(2 * (n_turns + 1), "overhead", "turn") as bar:
        for n in (1, n_rows):
            speeds = []
            for turn in range(n_turns + 1):
                speeds.append((of_generate(PROMPTS[:n], turn), of_server(PROMPTS[:n], turn)))
                bar.update()
            local, served = np.array(speeds[1:]).T  # the first turn warms up
            ratio = served / local
            rows.append(
                {"texts": n, "generate": np.median(local), "server": np.median(served)}
                | {"ratio": np.median(ratio), "low": ratio.min(), "high": ratio.max()}
            )
    return pd.DataFrame(rows).round(2)


def held(address: str, n: int) -> pd.DataFrame:
    """Requests that are sent at once."""
    with ThreadPoolExecutor(n) as pool, progress_bar(n, "held", "request") as bar:

        def ask_one(i: int) -> int:
            try:
                return ask(address, PROMPTS[i % len(PROMPTS)], 16, seed=i)
            except HTTPError:  # refused, or failed
                return 0
            finally:
                bar.update()

        counts = list(pool.map(ask_one, range(n)))
    return pd.DataFrame([{"sent": n, "answered": sum(count > 0 for count in counts)}])


def memory(address: str, process: psutil.Process, n: int) -> pd.DataFrame:
    """The server's memory in megabytes, at ten points."""
    points = sorted({max(1, round(n * part / 10)) for part in range(11)})
    rows = []
    with progress_bar(n, "memory", "text") as bar:
        for i in range(1, n + 1):
            ask(address, f" {i}." + PROMPTS[i % len(PROMPTS)], 2, seed=i)
            bar.update()
            if i in points:
                rows.append({"answered": i, "MB": round(process.memory_info().rss / 1e6)})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
