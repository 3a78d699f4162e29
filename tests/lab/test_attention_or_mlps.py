"""analyses/circuits/attention_or_mlps.py: shares of lex that outputs of attention and MLPs carry."""

import pandas as pd
import pytest
from conftest import script

from lapa2_interp.circuits import ContrastSet, patch
from lapa2_interp.models.load import load_model

pytestmark = pytest.mark.long
PROMPTS = [f"The {word} of the" for word in ("lake", "book", "city")]


@pytest.mark.parametrize("model", ["planted", "tiny-llama"])
def test_attention_of_all_layers_carries_everything(model, tmp_path):
    """With the target's attention outputs at every token behind the prefix, the other branch's
    residual stream is the target's: only attention reads the prefix."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    script("circuits/attention_or_mlps", model, "--prompts", tmp_path / "prompts.txt",
        "--tokens", "3", "--out", tmp_path,
    )  # fmt: skip
    table = pd.read_csv(tmp_path / "attention_or_mlps.csv", dtype={"layer": str})
    table = table.set_index(["output", "direction", "layer"])["share"].sort_index()
    assert (tmp_path / "attention_or_mlps.png").is_file()
    for direction in ("denoise", "noise"):
        assert table["attention", direction, "all"] == pytest.approx(1, abs=1e-3)
        if model == "planted":  # its MLPs write nothing
            assert (table["MLPs", direction].abs() < 1e-9).all()
    # One layer by the other form of the same patch.
    asked = ContrastSet.of(load_model(model), "sentiment", prompts=PROMPTS, tokens=3)
    one = {"own": [(1, slot) for slot in ("prompt", "last", "generated")]}
    patching = patch(load_model(model), asked, "mlp_out", direction="noise", together=one).frame()
    assert table["MLPs", "noise", "1"] == pytest.approx(patching["share"].iloc[0], abs=1e-4)
