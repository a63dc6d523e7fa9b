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
    Program("gluonts", ("gluonts[torch]==0.17.0",), (Job("gluonts_deepar", forecasting.gluonts_deepar, {"LSTM": 1}),)),
    Program(
        "transformers",
        ("transformers==5.23.0",),
        (
            Job("transformers_bert", text.transformers_bert, {"LayerNorm": 10}, recurrent=False),
            Job("transformers_gpt2", text.transformers_gpt2, {"LayerNorm": 9}, recurrent=False),
        ),
    ),
    Program(
        "darts",
        ("darts==0.48.1", "lightning==2.6.6"),
        (
            Job("darts_lstm", forecasting.darts_lstm, {"LSTM": 1}),
            Job("darts_block_gru", forecasting.darts_block_gru, {"GRU": 1}),
            Job("darts_tft", forecasting.darts_tft, {"LSTM": 2, "LayerNorm": 17}),
        ),
    ),
    Program(
        "neuralforecast",
        ("neuralforecast==3.3.0",),
        (
            Job("neuralforecast_lstm", forecasting.neuralforecast_lstm, {"LSTM": 1}),
            Job("neuralforecast_gru", forecasting.neuralforecast_gru, {"GRU": 1}),
            Job("neuralforecast_deepar", forecasting.neuralforecast_deepar, {"LSTM": 1}),
        ),
    ),
    Program(
        "pytorch-forecasting",
        ("pytorch-forecasting==1.8.0",),
        (
            Job("pytorch_forecasting_deepar", forecasting.pytorch_forecasting_deepar, {"LSTM": 1}),
            Job("pytorch_forecasting_gru", forecasting.pytorch_forecasting_gru, {"GRU": 1}),
            Job("pytorch_forecasting_tft", forecasting.pytorch_forecasting_tft, {"LSTM": 2, "LayerNorm": 11}),
        ),
    ),
    Program("tianshou", ("tianshou==2.0.1",), (Job("tianshou_dqn", agents.tianshou_dqn, {"LSTM": 1}),)),
    Program(
        "flair",
        ("flair==0.15.1",),
        (
            Job("flair_tagger", text.flair_tagger, {"LSTM": 1}),
            Job("flair_language_model", text.flair_language_model, {"LSTM": 1}),
        ),
    ),
    Program(
        "kraken",
        ("kraken==7.1.1",),
        (Job("kraken_recognizer", text.kraken_recognizer, {"LSTM": 2}),),
        dependencies=(
            *("lightning==2.6.1", "protobuf", "jsonschema", "pillow", "shapely", "scikit-image", "scipy", "regex"),
            *("lxml", "iso639-lang", "htrmopo", "pyarrow", "requests", "platformdirs", "threadpoolctl", "click<8.3"),
            *("scikit-learn", "coremltools==9.0"),
        ),
    ),
    Program(
        "openunmix",
        ("openunmix==1.3.0",),
        (Job("openunmix", audio.openunmix, {"LSTM": 1, "BatchNorm1d": 3}),),
        dependencies=("asteroid-filterbanks==0.4.0", "tqdm"),
    ),
)
