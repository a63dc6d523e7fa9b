"""The public programs: their packages, and what of their models is replaced."""

from __future__ import annotations

from typing import Final

from . import agents, audio, forecasting, text
from .declared import Job, Program

__all__ = ["PROGRAMS"]

PROGRAMS: Final = (
    Program(
        "sb3",
        ("sb3-contrib==2.9.2",),
        (
            Job("sb3_continuing", agents.sb3_continuing, {"LSTM": 2}),
            Job("sb3_episodes", agents.sb3_episodes, {"LSTM": 2}, ours=agents.sb3_episodes_in_one_call),
        ),
    ),
    Program("nam", ("neural-amp-modeler==0.13.0",), (Job("nam_lstm", audio.nam_lstm, {"_L": 1}),)),
    Program(
        "gluonts", ("gluonts[torch]==0.17.0",), (Job("gluonts_deepar", forecasting.gluonts_deepar, {"LSTM": 1}),)
    ),
    Program(
        "transformers",
        ("transformers==5.23.0",),
        (
            Job("transformers_bert", text.transformers_bert, {"LayerNorm": 10}, recurrent=False),
            Job("transformers_gpt2", text.transformers_gpt2, {"LayerNorm": 9}, recurrent=False),
        ),
    ),
)
