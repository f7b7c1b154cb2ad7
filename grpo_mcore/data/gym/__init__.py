"""NeMo Gym rollouts converted to training data: streamed, in constant memory, with every line accounted for."""

from grpo_mcore.data.gym.dpo import gym_to_dpo
from grpo_mcore.data.gym.grpo import gym_to_grpo
from grpo_mcore.data.gym.sft import gym_to_sft
from grpo_mcore.data.gym.summary import Summary
