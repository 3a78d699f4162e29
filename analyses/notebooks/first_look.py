# %% [markdown]
# # First look: a system prompt that fades, and every head
#
# A chat begins with a system message, and after a few turns the model hardly reads it. How far does
# it fade, and what does LaPA2 change? Then the same question for one prefix and one prompt: where
# does every head look, and what do the next-token logits do when a single head is kept from reading
# the prefix?
#
# Everything here is TransformerLens as you know it; `augmented(...)` is a context manager around
# any forward pass.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from IPython.display import HTML

from lapa2_interp import Augmentation, Layout, augmented, generate, load_model, plots
from lapa2_interp.attention import pooled
from lapa2_interp.methods import load_task
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.models import identify
from lapa2_interp.report import chat_fade, view

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder
torch.set_grad_enabled(False)
model = load_model(MODEL)
print(identify(model))

# %% [markdown]
# ## A system prompt that fades
#
# Five turns, without and with the bias on the system message. Each turn reads the chat again, and
# the bias acts where the answer's tokens are predicted. (A model without a chat template gets the
# simplest one.)

# %%
if model.tokenizer.chat_template is None:
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
task = chat_task(
    [
        {"role": "system", "content": "You are a sailor. Speak of the sea in every sentence."},
        {"role": "user", "content": "Tell me about two old friends."},
    ],
    later=["Where did they meet?", "What did they like?", "Why did they part?", "And in the end?"],
)
length = min(64, model.cfg.n_ctx // 32)
chats = generate(model, method="chat", task=task, alpha=[0.0, 0.5], length=length, eos="stop")
for _, answer in chats.texts().query("turn in (1, 5)").iterrows():
    print(f"{answer['arm']}, turn {answer['turn']}: {answer['continuation']!r}\n")

# %% [markdown]
# Of each answer: `keys` before it, the mean attention on the system message, and its effect, which
# is the Jensen-Shannon divergence of the next token's predictions with the message and with the
# message hidden from all later tokens, in nats.

# %%
fade = chat_fade(model, chats)
fade[["arm", "turn", "keys", "attention", "effect"]].round(4)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
for (arm, rows), colour in zip(fade.groupby("arm", sort=False), plots.COLOURS, strict=False):
    left.plot(rows["turn"], rows["attention"], "o-", ms=4, color=colour, label=arm)
    right.plot(
        rows["turn"], 1000 * rows["effect"].clip(lower=1e-9), "o-", ms=4, color=colour, label=arm
    )
left.set(xlabel="turn", ylabel="attention on the system message", ylim=(0, None))
right.set(xlabel="turn", ylabel="effect of the message, 1/1000 nats", yscale="log")
left.legend(frameon=False, fontsize=8)
for axes in (left, right):
    axes.set_xticks(range(1, 6))
    axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Which keys are the prefix?
#
# `layout` tokenises prefix and prompt together and finds the spans from character offsets. The bias
# of Eq. 9 goes to the slots `prefix`; `released` is what the paper's code boosts instead.

# %%
branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
pd.DataFrame(
    {
        "token": branch.tokens,
        "prefix": [branch.prefix.start <= slot < branch.prefix.stop for slot in range(len(branch))],
        "released": [slot < branch.spans("released")[0].stop for slot in range(len(branch))],
    }
)

# %% [markdown]
# ## `run_with_cache`, with and without
#
# `last_query` (the default phase) augments the query that predicts the first new token. The exact
# law: in the first layer, every head's log-odds of attending to the prefix move by exactly b.

# %%
augmentation = Augmentation(alpha=1.0)
_, plain = model.run_with_cache(branch.tensor)
with augmented(model, augmentation, branch):
    _, boosted = model.run_with_cache(branch.tensor)


def on_prefix(cache, layer):
    """Attention of the last query on the prefix: [head]."""
    return cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1, slice(*branch.prefix)].sum(-1)


b = branch.bias(augmentation, np.array([len(branch) - 1]))[0]
moved = torch.logit(on_prefix(boosted, 0)) - torch.logit(on_prefix(plain, 0))
print(
    f"b = {b:.4f}; log-odds moved by {moved.min():.4f} to {moved.max():.4f} over the heads of"
    " layer 0"
)
assert (moved - b).abs().max() < 1e-3

# %%
layers = range(model.cfg.n_layers)
maps = pd.concat(
    pd.DataFrame(
        {
            "arm": arm,
            "layer": layer,
            "head": range(model.cfg.n_heads),
            "prefix": on_prefix(cache, layer).numpy(),
        }
    )
    for arm, cache in (("plain", plain), ("alpha 1", boosted))
    for layer in layers
)
plots.head_maps(maps)

# %% [markdown]
# ## While it writes
#
# The same two arms over 64 tokens of text, traced head by head inside the decode loop.

# %%
prompts = load_task("sentiment").prompts.texts[:4]
runs = {
    arm: generate(model, attribute="positive", prompts=prompts, alpha=alpha, length=64, samples=2)
    for arm, alpha in {"plain": 0.0, "alpha 1": 1.0}.items()
}
for arm, run in runs.items():
    print(f"{arm}: {run.texts()['text'][0]!r}\n")

# %% [markdown]
# ## One head
#
# The head that attends to the prefix most without help, and its curve over the steps.

# %%
top = runs["plain"].heads().largest(1).iloc[0]
layer, head = int(top["layer"]), int(top["head"])
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (arm, run), colour in zip(runs.items(), plots.COLOURS, strict=False):
    curve = run.trace()["prefix"].isel(branch=0, layer=layer, head=head)
    axes.plot(curve.mean("sample"), color=colour, label=f"{arm}, head {layer}.{head}")
    axes.plot(
        np.nanmean(pooled(run.trace(), "prefix")[0], axis=0),
        color=colour,
        ls=":",
        label=f"{arm}, all heads",
    )
axes.set(xlabel="generation step", ylabel="attention on the prefix", ylim=(0, None))
axes.legend(frameon=False, fontsize=8)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## One text, every head
#
# The viewer shows every head's attention on every key of one text, without the bias and with it. A
# click on a token chooses the step, a click in the grid the head. (In a running notebook `shown`
# alone is a widget, whose head and token are `shown.head` and `shown.token`.)

# %%
pair = generate(
    model,
    "The lake",
    attribute="positive",
    parameters={"prefixes": "hard"},
    alpha=[0.0, 1.0],
    length=12,
)
shown = view(pair, model=model)
shown.head, shown.token = (layer, head), 3
HTML(shown.frame)

# %% [markdown]
# ## Blocked
#
# Keep that one head from reading the prefix (its scores there to -inf at every query after it) and
# compare next-token log-probabilities: what did the model get through this head?


# %%
def block(scores, hook):
    scores = scores.clone()
    scores[:, head, branch.prefix.stop :, slice(*branch.prefix)] = -torch.inf
    return scores


before = model(branch.tensor)[0, -1].log_softmax(-1)
after = model.run_with_hooks(
    branch.tensor, fwd_hooks=[(f"blocks.{layer}.attn.hook_attn_scores", block)]
)
change = after[0, -1].log_softmax(-1) - before
likely = before.topk(min(200, len(before))).indices
ranked = likely[change[likely].argsort()]
print(f"head {layer}.{head} blocked: KL divergence {(before.exp() * -change).sum():.4f} nats")
pd.DataFrame(
    {
        "less likely": [model.tokenizer.decode([i]) for i in ranked[:8].tolist()],
        "change (nats)": change[ranked[:8]].numpy(),
        "more likely": [model.tokenizer.decode([i]) for i in ranked.flip(0)[:8].tolist()],
        "change (nats) ": change[ranked.flip(0)[:8]].numpy(),
    }
)
