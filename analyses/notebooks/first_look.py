# %% [markdown]
# # First look: one prefix, every head
#
# [![open in Colab](https://colab.research.google.com/assets/colab-badge.svg)][colab]
#
# [colab]: https://colab.research.google.com/github/-owner-/lapa2-interp/blob/main/docs/notebooks/first_look.ipynb
#
# We put "Very positive:" in front of "The lake". Where does each head look? What does the bias of
# LaPA2 change? What does the model lose when one head cannot see the prefix? At the end we ask the
# same of a system prompt in a chat, and whether the answers follow it.
#
# **Running time:** about three minutes on two CPU cores, with SmolLM2-135M.
#
# The model is a TransformerBridge, the class of TransformerLens 4. `augmented(...)` is a context
# manager around any forward pass, and everything else is TransformerLens as you know it.

# %%
# Where the package is not installed, as on Colab, first take the # off the next line.
# # !pip install -q git+https://github.com/-owner-/lapa2-interp && lapa2 fetch
import os

import torch
from IPython.display import HTML

from lapa2_interp import Augmentation, Layout, augmented, generate, load_model, methods, report

MODEL = os.environ.get("LAPA2_MODEL", "smollm2-135m")  # or another of `lapa2 models`, or a folder
torch.set_grad_enabled(False)
model = load_model(MODEL)

# %% [markdown]
# ## Which keys are the prefix?
#
# A `Layout` tokenises prefix and prompt together, and finds the keys of each part. The bias acts on
# the keys of the prefix.

# %%
branch = Layout.of(model.tokenizer, "Very positive:", "The lake")
for slot, token in enumerate(branch.tokens):
    print(f"{slot} {token!r:>12}", "prefix" if slot in range(*branch.prefix) else "")

# %% [markdown]
# ## One pass, with and without the bias
#
# We read the attention of the last token on the prefix, in the first layer. The bias adds the same
# number `b` to the scores of all keys of the prefix. So in the first layer the log-odds of the
# attention on the prefix rise by `b` in every head. In later layers the inputs have changed, too.

# %%
augmentation = Augmentation(alpha=1.0)
_, plain = model.run_with_cache(branch.tensor)
with augmented(model, augmentation, branch):
    _, boosted = model.run_with_cache(branch.tensor)


def on_prefix(cache, layer):
    """Attention of the last query on the prefix: [head]."""
    return cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1, slice(*branch.prefix)].sum(-1)


l = len(branch) - branch.n_bos  # the keys that the last token sees, without BOS
b = augmentation.alpha * torch.tensor(l / branch.l_pre).log()
moved = torch.logit(on_prefix(boosted, 0)) - torch.logit(on_prefix(plain, 0))
print(f"b = {b:.4f}; log-odds moved by {moved.min():.4f} to {moved.max():.4f} in layer 0")
assert (moved - b).abs().max() < 1e-3

# %% [markdown]
# ## While it writes
#
# The model writes eight texts without the bias and eight with it. Each has up to 64 tokens, those
# of the prompt included. The attention of every head is recorded at every step. The picture shows
# the attention on the prefix as the texts grow, as a mean over all heads.

# %%
prompts = methods.load_task("sentiment").prompts.texts[:4]
run = generate(model, attribute="positive", prompts=prompts, alpha=[0.0, 1.0], length=64, samples=2)
for text in run.texts().groupby("arm", sort=False).first()["text"]:
    print(repr(text), end="\n\n")
run.plot()

# %% [markdown]
# The next picture shows each head by itself: layers are rows, heads are columns. Few heads give the
# prefix much attention. The second map is the difference that the bias makes.

# %%
run.heads().plot()

# %% [markdown]
# ## One text, every head
#
# The viewer shows the attention of each head on every key of one text, without the bias and with
# it. A click on a token chooses the step. A click in the grid chooses the head. We begin with the
# head that gives the prefix most attention without help. (In a running notebook, `shown` alone is
# a widget.)

# %%
top = run.select(alpha=0.0).heads().largest(1).iloc[0]
layer, head = int(top["layer"]), int(top["head"])
hard = {"prefixes": "hard"}
pair = generate(
    model, "The lake", attribute="positive", parameters=hard, alpha=[0.0, 1.0], length=12
)
shown = report.view(pair, model=model)
shown.head, shown.token = (layer, head), 3
HTML(shown.frame)

# %% [markdown]
# ## Without this head
#
# Attention does not say that a head matters. So we hide the prefix from this one head: its scores
# become -inf at every query after the prefix. Then we compare the log-probabilities of the next
# token. The tokens that become less likely are those that the model got through this head.


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
for title, tokens in (("less likely", ranked[:8]), ("more likely", ranked.flip(0)[:8])):
    print(f"{title}: ", end="")
    print(", ".join(f"{model.tokenizer.decode([i])!r} {change[i]:.2f}" for i in tokens.tolist()))

# %% [markdown]
# ## A system prompt that fades
#
# A chat begins with a system message. We let the model answer five times, without the bias and
# with the bias on the system message. After each answer we measure two things. `attention` is the
# mean attention on the system message. `effect` says how far the prediction of the next token moves
# when the message is hidden from all later tokens (Jensen-Shannon divergence, in nats). (A model
# without a chat template gets the simplest one.)

# %%
if model.tokenizer.chat_template is None:
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
task = methods.chat_task(
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

# %%
fade = report.chat_fade(model, chats)
fade[["arm", "turn", "keys", "attention", "effect"]].round(4)

# %%
for measured in ("attention", "effect"):
    fade.pivot(index="turn", columns="arm", values=measured).plot(style="o-", ylabel=measured)

# %% [markdown]
# ## Do the answers follow it?
#
# Attention and effect say what the model reads, not what it does. For some messages a program can
# say whether an answer follows them. Here the message allows twelve words, and four chats ask the
# same questions. The table has the percentage of answers that follow, by turn and arm.
#
# SmolLM2 hardly follows system messages, even at the first turn, so that little can fade. To see a
# message that is followed at first, set the variable `LAPA2_MODEL` to a larger model, such as
# `Qwen/Qwen2.5-Coder-1.5B-Instruct`, and run the notebook again. It follows six of 16 kinds of
# messages. `analyses/messages` in the repository has a study of it.

# %%
task = methods.chat_task(
    [
        {"role": "system", "content": "Use at most twelve words in an answer."},
        {"role": "user", "content": "How does one keep a cactus?"},
    ],
    later=["What helps against a cold?", "How do bees make honey?"],
)
chats = generate(
    model, method="chat", task=task, alpha=[0.0, 0.5], length=length, eos="stop", samples=4
)
answers = chats.texts()
answers["follows, %"] = 100.0 * (answers["continuation"].str.split().map(len) <= 12)
answers.groupby(["turn", "arm"])["follows, %"].mean().unstack()
