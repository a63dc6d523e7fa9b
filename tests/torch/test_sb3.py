"""RecurrentPPO's policies: one call with resets gives what sb3-contrib's loop over steps gives."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("sb3_contrib")
    import gymnasium
    import sb3_contrib.ppo_recurrent as theirs
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates
    from stable_baselines3.common.envs import FakeImageEnv, SimpleMultiObsEnv
    from stable_baselines3.common.vec_env import DummyVecEnv

    import retrograd.torch as rt
    from retrograd.torch import sb3

H = 16


def policies(kind: str, space: Any, **options: Any) -> tuple[Any, Any]:
    """sb3-contrib's policy and ours, with the same parameters."""
    made = []
    for module in (theirs, sb3):
        torch.manual_seed(0)
        options = {"lstm_hidden_size": H, **options}
        made.append(getattr(module, kind)(space, gymnasium.spaces.Discrete(3), lambda _: 1e-3, **options))
    assert type(made[0]) is not type(made[1])
    return made[0], made[1]


def states(policy: Any, samples: int) -> Any:
    torch.manual_seed(1)
    layers = policy.lstm_actor.num_layers
    return RNNStates(*((torch.randn(layers, samples, H), torch.randn(layers, samples, H)) for _ in range(2)))


def evaluated(policy: Any, observations: Any, starts: Any, samples: int) -> list[Any]:
    """Values, log probabilities and entropy of a batch of sequences, and the gradients of all parameters."""
    policy.zero_grad()
    actions = torch.arange(len(starts)) % 3
    results = policy.evaluate_actions(observations, actions, states(policy, samples), starts)
    sum(
        (result * torch.cos(torch.arange(len(starts)) + 0.5)).sum() for result in map(torch.flatten, results)
    ).backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return [*(result.detach() for result in results), *gradients]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_lstm_layers": 2},
        {"shared_lstm": True, "enable_critic_lstm": False},
        {"enable_critic_lstm": False},
        {"lstm_kwargs": {"bias": False}},
    ],
    ids=["separate", "layers", "shared", "no_critic", "no_bias"],
)
@pytest.mark.parametrize("starts", ["none", "first", "inside", "all"])
def test_losses_and_gradients_are_those_of_the_loop(starts: str, options: dict[str, Any]) -> None:
    samples, steps = 3, 7
    space = gymnasium.spaces.Box(-1, 1, (4,))
    plain, ours = policies("MlpLstmPolicy", space, **options)
    torch.manual_seed(2)
    observations = torch.randn(samples * steps, 4)
    where = torch.zeros(samples, steps)
    if starts == "first":
        where[1:, 0] = 1
    elif starts == "inside":
        where[0, 3] = where[2, 0] = where[2, 6] = 1
    elif starts == "all":
        where[:] = 1
    results = [evaluated(policy, observations, where.flatten(), samples) for policy in (plain, ours)]
    assert len(results[0]) == len(results[1]) > 3
    for expected, found in zip(*results, strict=True):
        assert expected.shape == found.shape
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    loss = results[0][0]
    if starts != "none" and options.get("enable_critic_lstm", True):  # the starts matter
        other = evaluated(ours, observations, torch.zeros(samples * steps), samples)[0]
        assert not torch.allclose(other, loss, atol=1e-4)


def test_the_lstm_is_called_once() -> None:
    _, ours = policies("MlpLstmPolicy", gymnasium.spaces.Box(-1, 1, (4,)))
    assert type(ours.lstm_actor) is type(ours.lstm_critic) is rt.LSTM
    calls = []
    ours.lstm_actor.register_forward_hook(lambda *_: calls.append(1))
    evaluated(ours, torch.randn(10, 4), torch.ones(10), 2)
    assert calls == [1]


def test_with_layers_of_torch_the_loop_is_used() -> None:
    plain, ours = policies("MlpLstmPolicy", gymnasium.spaces.Box(-1, 1, (4,)))
    rt.restore(ours, verbose=False)
    observations, starts = torch.randn(10, 4), (torch.arange(10) % 3 == 0).float()
    for expected, found in zip(*(evaluated(one, observations, starts, 2) for one in (plain, ours)), strict=True):
        assert torch.equal(found, expected)


def environment(kind: str) -> Any:
    if kind == "MlpLstmPolicy":
        return "CartPole-v1"
    if kind == "CnnLstmPolicy":
        images = FakeImageEnv(3, 36, 36, 1)
        images.observation_space.seed(0)  # it samples observations
        return images
    return DummyVecEnv([lambda: SimpleMultiObsEnv(random_start=False)])


@pytest.mark.parametrize(
    "kind", ["MlpLstmPolicy", pytest.param("CnnLstmPolicy", marks=pytest.mark.long), "MultiInputLstmPolicy"]
)
def test_a_training_run_gives_the_same_losses(kind: str) -> None:
    losses = []
    for module in (theirs, sb3):
        model = RecurrentPPO(
            getattr(module, kind),
            environment(kind),
            n_steps=32,
            batch_size=32,
            n_epochs=2,
            seed=0,
            policy_kwargs={"lstm_hidden_size": H},
            device="cpu",
        )
        found = []
        for _ in range(2):
            model.learn(32, reset_num_timesteps=False)
            found.append(model.logger.name_to_value["train/loss"])
        losses.append(found)
    assert np.isfinite(losses).all()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_model_is_saved_and_loaded(tmp_path: Any) -> None:
    options = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 0, "device": "cpu"}
    model = RecurrentPPO(sb3.MlpLstmPolicy, "CartPole-v1", policy_kwargs={"lstm_hidden_size": H}, **options)
    model.learn(16)
    model.save(tmp_path / "model.zip")
    loaded = RecurrentPPO.load(tmp_path / "model.zip")
    assert type(loaded.policy) is sb3.MlpLstmPolicy
    assert type(loaded.policy.lstm_actor) is rt.LSTM
    observation = np.array([0.1, 0.2, -0.1, 0.0], np.float32)
    for expected, found in zip(model.predict(observation)[1], loaded.predict(observation)[1], strict=True):
        assert np.array_equal(found, expected)


def test_a_subclass_of_a_policy() -> None:
    class Mine(theirs.MlpLstmPolicy):
        pass

    class Fast(sb3.ResetsInOneCall, Mine):
        pass

    policy = Fast(gymnasium.spaces.Box(-1, 1, (4,)), gymnasium.spaces.Discrete(3), lambda _: 1e-3, lstm_hidden_size=H)
    assert type(policy.lstm_actor) is rt.LSTM
    assert policy._process_sequence is sb3.ResetsInOneCall._process_sequence
