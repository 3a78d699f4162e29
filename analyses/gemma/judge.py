"""A judge of another family: logistic regression on features of a model that wrote no text here.

    python analyses/gemma/judge.py figures/rivals --model FOLDER --data FOLDER \\
        --features results/judge

For texts of SmolLM2 the features are those of Gemma 3 270M. A text is read after BOS; its features
are the mean of the residual stream over its tokens after each of a few layers. Training texts are
parts of labelled texts as generated ones are: 8 to 64 tokens, from their beginning or from
anywhere, cut where the part ends. Words of prefixes are hidden ("...") in half of them. Sentiment
has a third class, neutral (sentences of an encyclopaedia), which is never the answer. Toxicity is
regressed on Perspective's values.

The layer is chosen by texts held out of training; readers' labels decide nothing. The answers are a
column of readers.csv, and readers.agreement.csv says how often they are right, beside the scorers.
Features are kept, so that a repeated call resumes.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from analyses.lab.scripts import ScriptOptions
from analyses.rivals.readers import LABELS, hidden_words, save
from lapa2_interp.models.load import load_transformers
from lapa2_interp.progress import progress_bar
from lapa2_interp.scoring.echo import MASK

NEUTRAL = "neutral"
LAYERS = (6, 8, 10, 12, 15)
SHORTEST, LONGEST = 8, 64
SOURCES = {
    "sentiment": [("sentiment/sst2_train", 4000), ("sentiment/imdb_train", 5000)],
    "topic": [("topic/agnews_train", 8000)],
    "detox": [("toxicity/rtp_perspective", 6000)],
}


def rows_of(file: Path) -> list[dict]:
    """The rows of a compressed file of JSON lines."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def labelled(task: str, data: Path, rng: np.random.Generator) -> tuple[list[str], list]:
    """Texts of a task and their labels; of toxicity log-odds by Perspective."""
    texts, labels = [], []
    for name, n in SOURCES[task]:
        rows = rows_of(data / f"{name}.jsonl.xz")
        if task == "detox":
            pairs = [
                (part["text"], part["toxicity"])
                for row in rows
                for part in (row["prompt"], row["continuation"])
                if part.get("toxicity") is not None and part["text"].strip()
            ]
            pairs = [(text, float(np.log(max(p, 1e-3) / max(1 - p, 1e-3)))) for text, p in pairs]
        else:
            pairs = [(row["text"], row["label"]) for row in rows]
        chosen = rng.permutation(len(pairs))[:n]
        texts += [pairs[i][0] for i in chosen]
        labels += [pairs[i][1] for i in chosen]
    if task == "sentiment":
        with lzma.open(data / "text/wikitext103_valid.txt.xz", "rt", encoding="utf-8") as lines:
            articles = [line.strip() for line in lines if len(line) > 300]
        chosen = rng.permutation(len(articles))[:1500]
        texts += [articles[i].replace("<unk>", "") for i in chosen]
        labels += [NEUTRAL] * len(chosen)
    return texts, labels


def parts(texts: Sequence[str], task: str, tokenizer, rng: np.random.Generator) -> list[str]:
    """A part of each text, with hidden words in half of them."""
    hidden, cut = hidden_words(task), []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        n = round(float(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST)))))
        first = 0 if rng.random() < 0.5 or len(ids) <= n else int(rng.integers(len(ids) - n + 1))
        part = tokenizer.decode(ids[first : first + n])
        cut.append(hidden.sub(MASK, part) if rng.random() < 0.5 else part)
    return cut


@torch.inference_mode()
def features(network, tokenizer, texts: Sequence[str], what: str) -> np.ndarray:
    """The mean residual stream of each text: [text layer d_model]."""
    ids = [
        [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids[:128]]
        for text in texts
    ]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    pooled = np.zeros((len(ids), len(LAYERS), network.config.hidden_size), np.float32)
    with progress_bar(len(ids), what, "text") as bar:
        for first in range(0, len(order), 32):
            rows = order[first : first + 32]
            width = max(len(ids[i]) for i in rows)
            batch = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in rows])
            live = torch.tensor([[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in rows])
            states = network.model(
                batch, attention_mask=live, output_hidden_states=True, use_cache=False
            ).hidden_states
            weights = live.clone()
            weights[:, 0] = 0  # BOS
            share = (weights / weights.sum(1, keepdim=True).clamp(min=1)).float()
            for at, layer in enumerate(LAYERS):
                mean = torch.einsum("rq,rqd->rd", share, states[layer].float())
                pooled[rows, at] = mean.numpy()
            bar.update(len(rows))
    return pooled


def main() -> None:
    """Train the judge of each task, and compare it with the readers."""
    parser = ScriptOptions("A judge of another family")
    parser.add_argument("folder", type=Path, help="of readers.csv")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    options = parser.parse_args()
    options.features.mkdir(parents=True, exist_ok=True)
    network, tokenizer, _ = load_transformers(options.model, "bfloat16")
    table = pd.read_csv(options.folder / "readers.csv", keep_default_na=False)
    answers = pd.Series(index=table.index, dtype=object)
    for task in SOURCES:
        rng = np.random.default_rng(1)
        texts, labels = labelled(task, options.data, rng)
        texts = parts(texts, task, tokenizer, rng)
        file = options.features / f"{task}.npy"
        if file.exists():
            read = np.load(file)
        else:
            read = features(network, tokenizer, texts, f"training texts, {task}")
            np.save(file, read)
        own = table[table["task"] == task]
        own_read = features(network, tokenizer, list(own["text"]), f"readers' texts, {task}")
        answers[own.index] = judge(task, read, np.array(labels), own_read)
    table["gemma"] = answers
    save(table, options.folder)


def judge(task: str, read: np.ndarray, labels: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The judge's answers: labels, or of toxicity its log-odds."""
    order = np.random.default_rng(2).permutation(len(labels))
    held, used = order[: len(order) // 6], order[len(order) // 6 :]
    best = None
    for at, layer in enumerate(LAYERS):
        for strength in (1e-3, 1e-2, 1e-1):
            if task == "detox":
                model = make_pipeline(StandardScaler(), Ridge(alpha=1 / strength))
            else:
                model = make_pipeline(
                    StandardScaler(), LogisticRegression(C=strength, max_iter=300)
                )
            model.fit(read[used, at], labels[used])
            right = model.score(read[held, at], labels[held])
            if best is None or right > best[0]:
                best = right, layer, strength, model, at
    right, layer, strength, model, at = best
    print(f"{task}: {right:.3f} on {len(held)} held-out parts, after layer {layer}, C {strength:g}")
    if task == "detox":
        return model.predict(own[:, at])
    classes = list(model[-1].classes_)
    columns = [classes.index(label) for label in LABELS[task][:-1]]
    return np.array(LABELS[task])[model.predict_proba(own[:, at])[:, columns].argmax(1)]


if __name__ == "__main__":
    main()
