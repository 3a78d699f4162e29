"""What the room refuses: a call, and what its one line says. Calls write and read in an empty
folder."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from conftest import generate, load, soft_set
from safetensors.torch import save
from test_prefix_importing import SIZES, adapter, air_checkpoint
from test_prefix_training import NEGATIVE, POSITIVE, SENTIMENT, SMALL, job

from lapa2_interp.errors import DataError, PrefixError
from lapa2_interp.methods import load_task
from lapa2_interp.methods import registry as methods
from lapa2_interp.prefixes.importing import import_prefix
from lapa2_interp.prefixes.recipes import training_recipe
from lapa2_interp.prefixes.soft_prefix import find_prefix, load_prefix
from lapa2_interp.prefixes.training import train_set
from lapa2_interp.tasks.corpora import Corpus, read_corpus

# --- corpora and training

CORPORA = [
    ("a.jsonl", "", "has no field 'text'"),
    (
        "a.jsonl",
        '{"text": "x", "label": "positive"}\n',
        r"no text with label 'negative' \(blank ones and repetitions left out\); its labels are"
        " 'positive'",
    ),
    (
        "a.jsonl",
        '{"txt": "x", "label": "positive"}\n',
        "no field 'text'; found txt, label; give text and label",
    ),
    ("a.jsonl", "not json\n", "cannot read"),
    (
        "a.txt",
        "x",
        "unknown corpus .*allowed: imdb, sst2, agnews, or a file that ends in .jsonl, .csv,"
        " .parquet",
    ),
    ("a.jsonl.xz", "not xz", "cannot read"),
    ("a.jsonl.zip", "no zip", "cannot read .*not a zip file"),
]
"""A file's name and content, and the error."""
RECIPES = [
    ({"objective": "mse"}, "objective: input should be 'mle' or 'contrastive', found 'mse'"),
    ({"larning_rate": 1}, "unknown field 'larning_rate'; allowed: objective"),
    ({"lr": 0}, "lr: input should be greater than 0"),
    (
        {"parameterisation": "air", "start": "text"},
        "start 'text' sets keys and values themselves",
    ),
    ({"parameterisation": "air", "shared": 9}, "shared sets keys and values themselves"),
    (
        {"start": "set", "shared": 9},
        "start 'set' begins each attribute with a prefix of its own; use shared=0",
    ),
]


def corpus(name, content):
    Path(name).write_text(content)
    return read_corpus(name, ["positive", "negative"])


def trained(model="tiny-gpt2", attributes=None, **settings):
    texts = Corpus({"positive": tuple(POSITIVE), "negative": tuple(NEGATIVE)}, "texts")
    recipe = training_recipe("small", **SMALL | settings)
    more = {} if attributes is None else {"attributes": attributes}
    return train_set(model, SENTIMENT, [texts], [texts], Path("set"), recipe, **more)


def with_nan():
    training = job(folder=Path())
    with torch.no_grad():
        training.parameters.both[:] = torch.nan
    training._train_step()


TRAININGS = {
    "a file that is not there": (
        lambda: read_corpus("none.jsonl", ["positive"]),
        "cannot read",
        DataError,
    ),
    "a hub that does not answer": (
        lambda: read_corpus("imdb", ["positive"]),
        "cannot load stanfordnlp/imdb from the hub .*; give a file instead",
        DataError,
    ),
    "an unknown recipe": (
        lambda: training_recipe("smal"),
        "unknown recipe 'smal'; allowed: small, .*did you mean 'small'",
    ),
    "a contrast of one attribute": (
        lambda: trained(objective="contrastive", attributes=["positive"]),
        "needs texts of two attributes at least; found only 'positive'",
        DataError,
    ),
    "a contrast of one attribute twice": (
        lambda: trained("tiny-llama", objective="contrastive", attributes=["positive"] * 2),
        "needs texts of two attributes at least; found only 'posi",
        DataError,
    ),
    "a loss of NaN": (with_nan, "the loss of positive is nan at step 0; lower lr"),
    "texts that are too long": (
        lambda: trained(max_tokens=300),
        "14 slots or tokens of a prefix, BOS and 300 tokens of a text exceed .* of 256; give",
    ),
}


# --- sets


def spoiled(spoil, attribute="positive"):
    """A prefix of a set to which something has happened."""
    soft_set(Path("set"), load("tiny-gpt2"), SENTIMENT)
    spoil(Path("set"))
    return load_prefix(Path("set"), attribute)


def with_other_tensors(folder):
    """The card describes the file."""
    stored = save({"weight": torch.zeros(3)})
    (folder / "positive.safetensors").write_bytes(stored)
    card = json.loads((folder / "positive.json").read_text())
    (folder / "positive.json").write_text(json.dumps(card | {"sha256": sha256(stored).hexdigest()}))


def without_set():
    method = methods.get("prefix", prefixes="mle")
    return generate(load("tiny-gpt2"), method, load_task("topic"), "world", ["The lake"], length=20)


SETS = {
    "no weights": (
        lambda: spoiled(lambda folder: (folder / "positive.safetensors").unlink()),
        "has no weights: positive.safetensors is not beside it",
    ),
    "other weights": (
        lambda: spoiled(lambda folder: (folder / "positive.safetensors").write_bytes(b"abc")),
        "not the file its card describes",
    ),
    "another card": (
        lambda: spoiled(
            lambda folder: (folder / "positive.json").write_text('{"attribute": "positive"}')
        ),
        "not the card of a soft prefix",
    ),
    "no card": (
        lambda: spoiled(lambda folder: (folder / "positive.json").unlink()),
        "no soft prefix 'positive' in .*; there are: negative",
    ),
    "other tensors": (lambda: spoiled(with_other_tensors), "does not hold keys and values"),
    **{
        f"the attribute {attribute!r}": (
            lambda attribute=attribute: spoiled(lambda folder: None, attribute),
            "cannot name a file of a soft prefix",
        )
        for attribute in ("", "../calm", "a/b", "a\0b")
    },
    "no set of a model": (
        without_set,
        "no soft prefixes 'mle' of task topic for tiny-gpt2; hard ones .*prefixes=hard",
    ),
    "no set of a name": (
        lambda: find_prefix(load("smollm2-135m"), "topic", "mel", "world"),
        "no soft prefixes 'mel' of task topic for smollm2-135m; allowed: contrastive, mle",
    ),
}


# --- prefixes that others trained


def imported(source, attribute="positive"):
    return import_prefix(Path(source), load("tiny-gpt2"), "sentiment", attribute, "x")


def of_peft(settings=(), tensor=(3, 256)):
    """An adapter of PEFT with other settings, or a tensor of another shape."""
    tensors = tensor and {"prompt_embeddings": torch.zeros(tensor)}
    adapter(Path("adapter"), SIZES | dict(settings), tensors)
    return imported("adapter")


def lora():
    adapter(Path("lora"), {"peft_type": "LORA"}, None)
    return imported("lora")


def without_object():
    adapter(Path("adapter"), SIZES, {"prompt_embeddings": torch.zeros(3, 256)})
    Path("adapter/adapter_config.json").write_text("[]")
    return imported("adapter")


def of_bytes():
    Path("damaged.safetensors").write_bytes(b"12345678901234")
    return imported("damaged.safetensors")


def of_pickle(value):
    torch.save(value, "file.pt")
    return imported("file.pt")


def of_air(attribute="positive", **changed):
    """An Air-Decoding checkpoint, with other tensors; None is left out."""
    tensors = air_checkpoint(load("tiny-gpt2")) | changed
    torch.save({name: one for name, one in tensors.items() if one is not None}, "air.pt")
    return imported("air.pt", attribute)


MLP = "transformer.h.1.attn.prefix_mlp_n0"
IMPORTS = {
    "a LoRA": (lora, "adapter of type LORA; only PREFIX_TUNING holds keys and values"),
    "a short tensor": (
        lambda: of_peft(tensor=(3, 7)),
        r"expected prompt_embeddings of \[3 slots, 4 layers x 2 x 32\]; found prompt_embeddings"
        r" \(3, 7\)",
    ),
    "a wide tensor": (
        lambda: of_peft({"token_dim": 64}, (3, 512)),
        "has 4 layers x 4 KV heads x 3 slots x 16; tiny-gpt2 needs 4 layers x 4 KV heads x 3"
        " slots x 8",
    ),
    **{
        f"settings {wrong}": (
            lambda wrong=wrong: of_peft(wrong, (3, 240)),
            "adapter_config.json needs positive whole numbers, .*; found {'num",
        )
        for wrong in ({"token_dim": 30}, {"num_layers": "4"}, {"num_layers": True})
    },
    "more slots": (
        lambda: of_peft({"num_virtual_tokens": 9}),
        r"expected prompt_embeddings of \[9 slots",
    ),
    "two parts": (
        lambda: of_peft({"num_transformer_submodules": 2}),
        "has num_transformer_submodules 2; ",
    ),
    "a base that is a number": (
        lambda: of_peft({"base_model_name_or_path": 5}),
        "has base_model_name_or_path '5'; allowed: the",
    ),
    "settings that are a list": (without_object, "adapter_config.json holds no JSON object"),
    "an adapter without weights": (
        lambda: of_peft(tensor=None),
        "has no weights; expected one of adapter_model.safetensors",
    ),
    "nothing": (lambda: imported("nothing"), "no such file or folder"),
    "damaged tensors": (of_bytes, "is damaged or not a checkpoint"),
    "a list of tensors": (
        lambda: of_pickle([torch.zeros(2)]),
        "is not a dictionary of tensors",
    ),
    "another checkpoint": (
        lambda: of_pickle({"weight": torch.zeros(2)}),
        "neither a PEFT adapter .* nor an Air-Decoding checkpoint",
    ),
    "no prefix of the attribute": (
        lambda: of_air("negative"),
        "has no prefix 1; it has 0, 3",
    ),
    "an unknown attribute": (
        lambda: of_air("calm"),
        "unknown attribute of the Air-Decoding checkpoints 'calm'; .*or give number",
    ),
    **{
        f"{name} of {wrong if wrong is None else tuple(wrong.shape)}": (
            lambda name=name, wrong=wrong: of_air(**{f"{MLP}.{name}": wrong}),
            "prefix 0 does not fit 4 heads .*; give the model it was trained",
        )
        for name, wrong in (
            ("weight", torch.zeros(6, 30)),
            ("weight", torch.zeros(32, 6)),
            ("bias", torch.zeros(9)),
            ("bias", None),
        )
    },
    "no values of a layer": (
        lambda: of_air(**{"transformer.h.2.attn.prefix_values_embeddings_n0.weight": None}),
        "prefix 0 lacks the values of layer 2",
    ),
}


def rows():
    for name, content, message in CORPORA:
        call = lambda name=name, content=content: corpus(name, content)  # noqa: E731
        yield f"{name} of {content[:20]!r}", call, message, DataError
    for settings, message in RECIPES:
        call = lambda settings=settings: training_recipe("small", **settings)  # noqa: E731
        yield f"{settings}", call, message, PrefixError
    for name, row in {**TRAININGS, **SETS, **IMPORTS}.items():
        yield name, *(*row, PrefixError)[:3]


@pytest.mark.parametrize(
    ("call", "message", "error"), [pytest.param(*row, id=name) for name, *row in rows()]
)
def test_what_the_room_refuses(call, message, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call()
