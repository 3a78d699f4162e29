"""The layers of a model in the order of DIRECTER, for method `gate`.

    python analyses/tools/layer_order.py smollm2-135m --prompts prompts.txt --augmentation key-scale

Not in the paper. One layer at a time is steered, at the last token of prefix and prompt. With the
input x_j and the output y_j of the attention of layer j, primed where layer i is steered,

    d_ij = 1 - cos(x_j, y'_j) + 1 - cos(y_j, x'_j),     at least 0,

as in mjk0618/directer, src/generator.py (`_rank_layers`, which averages over i, too). Layers are
ordered by the mean of d_ij over i, largest first. There each text has an order of its own, here it
is one: the mean over prompts and attributes. Choose prompts that the comparison does not have.

What steers hardly matters: x_j and y_j differ more from layer to layer than steering changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.lab.scripts import ScriptOptions, whole_number
from lapa2_interp import Augmentation, Layout, augmented
from lapa2_interp.bias.augmentation import within
from lapa2_interp.bias.recipes import parse_recipes
from lapa2_interp.errors import ModelError
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import load_transformers
from lapa2_interp.progress import progress_bar
from lapa2_interp.tasks.prompts import read_prompts


def main() -> None:
    """Print the order."""
    parser = ScriptOptions("Layers in the order of DIRECTER")
    parser.add_argument("model", help="a name of `lapa2 models`, a hub id or a folder")
    parser.add_argument("--task", default="sentiment")
    parser.add_argument("--prompts", type=Path, required=True, help="a file, a prompt a line")
    parser.add_argument("--n", type=whole_number(), default=16, help="prompts that are read")
    parser.add_argument("--augmentation", default="key-scale", help="what steers")
    options = parser.parse_args()
    network, tokenizer, _ = load_transformers(options.model, "float32")
    task, rules = load_task(options.task), parse_recipes(options.augmentation)
    layouts = [
        Layout.of(tokenizer, task.prefix(attribute), prompt)
        for prompt in read_prompts(options.prompts)[: options.n]
        for attribute in task.attributes
    ]
    changes = []
    with progress_bar(len(layouts), "ranking", "text") as bar:
        for layout in layouts:
            changes.append(disturbances(network, rules, layout))
            bar.update()
    print("/".join(map(str, ranked(torch.stack(changes)))))


def ranked(changes: Float[Tensor, "text steered layer"]) -> list[int]:
    """The layers, that of the largest mean first."""
    return changes.mean(dim=(0, 1)).argsort(descending=True).tolist()


@torch.no_grad()
def disturbances(
    network: Any, rules: Sequence[Augmentation], layout: Layout
) -> Float[Tensor, "steered layer"]:
    """d_ij; a layer in which no rule acts counts as one that is steered by nothing."""
    plain_in, plain_out = attention_states(network, None, layout)
    rows = []
    for steered in range(len(plain_in)):
        inputs, outputs = attention_states(network, within(rules, [steered]), layout)
        both = torch.cosine_similarity(plain_in, outputs, dim=1)
        both = both + torch.cosine_similarity(plain_out, inputs, dim=1)
        rows.append((2 - both).clamp(min=0))
    return torch.stack(rows)


def attention_states(
    network: Any, rules: Any, layout: Layout
) -> tuple[Float[Tensor, "layer d_model"], Float[Tensor, "layer d_model"]]:
    """Inputs and outputs of the attention of every layer, at the last token.

    Raises:
        ModelError: The layers' attention has another name than in Llama, GPT-2 and GPT-NeoX.
    """
    states: list[tuple[Tensor, Tensor]] = []

    def keep(_module: Any, args: tuple, named: dict[str, Any], result: Any) -> None:
        read = args[0] if args else named["hidden_states"]
        states.append((read[0, -1], result[0][0, -1]))

    hooks = [
        module.register_forward_hook(keep, with_kwargs=True)
        for name, module in network.named_modules()
        if name.endswith((".self_attn", ".attn", ".attention"))
    ]
    try:
        with augmented(network, rules, layout):
            network(layout.tensor)
    finally:
        for hook in hooks:
            hook.remove()
    if len(states) != network.config.num_hidden_layers:
        raise ModelError(
            f"found the attention of {len(states)} layers of {network.config.num_hidden_layers}: it"
            f" is no module self_attn, attn or attention in {type(network).__name__}; give `gate`"
            " another order"
        )
    inputs, outputs = zip(*states, strict=True)
    return torch.stack(inputs), torch.stack(outputs)


if __name__ == "__main__":
    main()
