"""Methods are pure arithmetic and need no model."""

import pytest
import torch

from lapa2_interp import methods
from lapa2_interp.errors import MethodError


@pytest.mark.parametrize(("name", "branch"), [("none", "base"), ("prefix", "prefix"), ("negprompt", "prefix")])
def test_direct_methods_pass_their_branch_on(name, branch):
    method = methods.get(name)
    assert [each.name for each in method.branches("positive")] == [branch]
    log_probs = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
    assert torch.equal(method.combine({branch: log_probs}, None), log_probs)
    assert method.advance(None, {branch: log_probs}, torch.tensor([1])) is None


def test_the_papers_alphas():
    assert {name: method.alpha for name, method in methods.registry().items()} == {
        "none": 0.0,
        "prefix": 0.5,
        "negprompt": 1.0,
    }


def test_unknown_methods_and_parameters():
    with pytest.raises(
        MethodError, match="unknown method 'prefx'; allowed: none, prefix, negprompt; did you mean 'prefix'"
    ):
        methods.get("prefx")
    with pytest.raises(MethodError, match="method 'prefix'.*omega"):
        methods.get("prefix", omega=3)
