"""The command `lapa2 propositions`."""

from __future__ import annotations

from lapa2_interp.cli.functions import command_of
from lapa2_interp.propositions.settings import PropositionSettings

propositions = command_of(PropositionSettings, "propositions.study:run_proposition_study")
