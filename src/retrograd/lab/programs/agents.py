"""Jobs of reinforcement learning libraries."""

from __future__ import annotations

from typing import Any

from .declared import Step

__all__ = ["sb3_continuing", "sb3_episodes", "sb3_episodes_in_one_call", "tianshou_dqn"]


def _recurrent_ppo(policy: Any, environment: str, samples: int, rollouts: int, environments: int) -> Step:
    """An epoch of training: one batch, which is the last rollout."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    batch = samples * environments
    model = RecurrentPPO(
        policy,
        make_vec_env(environment, environments, seed=0),
        n_steps=samples,
        batch_size=batch,
        n_epochs=1,
        seed=0,
        policy_kwargs={"lstm_hidden_size": 64},
    )
    model.learn(rollouts * batch)

    def step() -> Any:
        model.train()
        return model.logger.name_to_value["train/loss"]

    return step


def sb3_continuing() -> Step:
    """Two LSTMs of 64 units over 64 steps of 4 pendulums. No episode starts among them."""
    return _recurrent_ppo("MlpLstmPolicy", "Pendulum-v1", samples=64, rollouts=2, environments=4)


def sb3_episodes() -> Step:
    """The same over 64 steps of 4 poles on carts, whose episodes have 20 steps or so."""
    return _recurrent_ppo("MlpLstmPolicy", "CartPole-v1", samples=64, rollouts=1, environments=4)


def sb3_episodes_in_one_call() -> Step:
    """The same with retrograd's policy."""
    from retrograd.torch.sb3 import MlpLstmPolicy

    return _recurrent_ppo(MlpLstmPolicy, "CartPole-v1", samples=64, rollouts=1, environments=4)


def tianshou_dqn() -> Step:
    """A recurrent double DQN: an LSTM of 64 units over stacks of 16 observations, in the network and its target."""
    import gymnasium
    from tianshou.algorithm import DQN
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Recurrent
    from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

    environments = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(4)])
    environments.seed(0)
    policy = DiscreteQLearningPolicy(
        model=Recurrent(layer_num=1, state_shape=4, action_shape=2, hidden_layer_size=64),
        action_space=gymnasium.spaces.Discrete(2, seed=0),
        eps_training=1.0,
    )
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=100)
    buffer = VectorReplayBuffer(1000, buffer_num=4, stack_num=16, ignore_obs_next=True)
    collector = Collector(algorithm, environments, buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=400)

    def step() -> Any:
        with policy_within_training_step(policy), torch_train_mode(algorithm):
            return algorithm.update(buffer, sample_size=64).loss

    return step
