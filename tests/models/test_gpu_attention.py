"""Attention without the matrix where no kernel of PyTorch returns the log of the sum: on a GPU, and
on a CPU whose kernel is taken away.

    pytest tests/models/test_gpu_attention.py
"""

import numpy as np
import pytest
import torch

from lapa2_interp import Augmentation, Layout, augmented, load_model
from lapa2_interp.attention.recorder import Recorder
from lapa2_interp.bias.padded_rows import PaddedRows
from lapa2_interp.generation.teacher_forcing import teacher_forced
from lapa2_interp.models import span_attention
from lapa2_interp.models.facts import FUSED, path_of_pass

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]
RULES = {
    "log": Augmentation(alpha=0.7),
    "target": Augmentation(alpha=0.8, law="target", tau=0.3, phase="after_span"),
    "cut": Augmentation(alpha=1, law="cut"),
}
TEXTS = torch.tensor([[40, 41, 42, 43, 44, 45, 46] * 4, [90, 81, 72, 63, 54, 45, 36] * 4])


@pytest.fixture(autouse=True)
def no_kernel_returns_the_sum(monkeypatch):
    monkeypatch.setattr(span_attention, "LSE_KERNELS", {})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-neox"])
@torch.no_grad()
def test_logits_and_traces_are_those_of_the_matrix(name, rule, device):
    model = load_model(name, "float64", device, "TransformersModel")
    prompts = ("The lake", "A book is on the")
    rows = PaddedRows.of([Layout.of(model, "Very good:", prompt) for prompt in prompts], device)
    ids = torch.cat([rows.ids, TEXTS.to(device)], dim=1)
    mask = torch.cat([rows.mask, torch.ones_like(TEXTS, device=device)], dim=1)
    logits, sums = [], []
    for attn in ("matrix", "fused"):
        model.attn, recorder = attn, Recorder(4, 4)
        recorder.begin(rows.layouts)
        with augmented(model, RULES[rule], rows.layouts, recorder) as paths:
            logits.append(model(ids, attention_mask=mask)[:, -TEXTS.shape[1] :].cpu())
        traces = [
            recorder.dataset(rows.layouts, ("target",), [TEXTS.shape[1] + 1] * 2),
            teacher_forced(model, rows.layouts, TEXTS, RULES[rule]),
        ]
        sums.append([trace[part] for trace in traces for part in ("prefix", "generated")])
    assert {*paths.values()} == {FUSED}
    # Llama normalises in float32.
    torch.testing.assert_close(*logits, atol=1e-6, rtol=0)
    for fused, matrix in zip(*sums, strict=True):
        np.testing.assert_allclose(fused, matrix, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [30, 12])
def test_gradients_are_those_of_finite_differences(device, queries):
    """Of outputs and log-sum-exp, also behind a cache."""
    torch.manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, 2, 30, 8), (2, 2, 30, 8), (2, 1, queries)]
    leaves = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    span = (torch.arange(30, device=device) < 5).expand(2, -1)

    def read(query, key, value, bias):
        scores = span_attention.SpanScores(query, key, value, 0.3)
        scores.add(span, bias)
        return scores.outputs(), scores.lse

    for leaf in leaves:
        inputs = [x.requires_grad_(x is leaf) for x in leaves]
        assert torch.autograd.gradcheck(read, inputs, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
def test_only_a_cpu_decides_by_itself(device):
    assert (path_of_pass("auto", 4096, 4096, device) == FUSED) == (device == "cpu")
