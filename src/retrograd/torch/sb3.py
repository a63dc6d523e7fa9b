"""Policies for RecurrentPPO of sb3-contrib: one call of the LSTM for a batch of sequences, also where episodes start.

sb3-contrib's own policies call the LSTM once for every time step as soon as an episode starts in a batch.
"""

from __future__ import annotations

from typing import Any

import sb3_contrib.ppo_recurrent as theirs
import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from torch import Tensor

from .recurrent import LSTM
from .replacing import replace

__all__ = ["CnnLstmPolicy", "MlpLstmPolicy", "MultiInputLstmPolicy", "ResetsInOneCall"]


class ResetsInOneCall(RecurrentActorCriticPolicy):
    """Goes before a recurrent policy among the bases of a class: ``class Mine(ResetsInOneCall, TheirPolicy)``.

    The policy's recurrent layers and normalizations are retrograd's, as after :func:`retrograd.torch.replace`. Its
    parameters and its results are those of the class after it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        replace(self, verbose=False)

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: torch.nn.LSTM
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if not isinstance(lstm, LSTM):
            found: tuple[Tensor, tuple[Tensor, Tensor]]
            found = RecurrentActorCriticPolicy._process_sequence(features, lstm_states, episode_starts, lstm)
            return found
        samples = lstm_states[0].shape[1]
        x = features.reshape(samples, -1, lstm.input_size).swapaxes(0, 1)
        starts = episode_starts.reshape(samples, -1).swapaxes(0, 1)
        y, states = lstm(x, lstm_states, reset=starts != 0)
        return y.transpose(0, 1).flatten(0, 1), states


class MlpLstmPolicy(ResetsInOneCall, theirs.MlpLstmPolicy):
    """sb3-contrib's policy of this name, with the same arguments."""


class CnnLstmPolicy(ResetsInOneCall, theirs.CnnLstmPolicy):
    """sb3-contrib's policy of this name, with the same arguments."""


class MultiInputLstmPolicy(ResetsInOneCall, theirs.MultiInputLstmPolicy):
    """sb3-contrib's policy of this name, with the same arguments."""
