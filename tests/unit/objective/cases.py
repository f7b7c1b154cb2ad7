"""Settings of the loss, by name: one for each term and for the combinations that matter."""

from __future__ import annotations

IS = {"use_importance_sampling_correction": True}
TIS = {**IS, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.3}
ICEPOP = {
    **IS,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 1.5,
    "truncated_importance_sampling_ratio_min": 0.6,
}
SEQ_MASK = {
    **IS,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": 1.1,
    "truncated_importance_sampling_ratio_min": 0.85,
}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CONFIGS = {
    "grpo": {},
    "asymmetric": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "dual clip": {"ratio_clip_c": 1.4},
    "sequence level": {"token_level_loss": False},
    "gspo": GSPO,
    "gspo, weights": {**GSPO, **IS},
    "gspo, tis": {**GSPO, **TIS, "truncated_importance_sampling_ratio": 1.05},
    "gspo, icepop": {**GSPO, **ICEPOP},
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.5},
    "reinforce": {"disable_ppo_ratio": True},
    "forced on policy": {"force_on_policy_ratio": True},
    "gspo, forced": {**GSPO, "force_on_policy_ratio": True},
    "weights": IS,
    "tis": TIS,
    "icepop": ICEPOP,
    "seq-mask-tis": SEQ_MASK,
    "seq-mask-tis, sequence level": {**SEQ_MASK, "token_level_loss": False},
    "on-policy kl": {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.5},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.5},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.5},
    "tight clamps": {
        "kl_input_clamp_value": 0.4,
        "kl_output_clamp_value": 0.075,
        "reference_policy_kl_penalty": 0.5,
    },
    "no clamps": {
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        "reference_policy_kl_penalty": 0.5,
    },
    "no kl": {"reference_policy_kl_penalty": 0.0},
    "kl in reward": {"use_kl_in_reward": True},
    "positive nll": {"positive_example_nll_weight": 0.3},
}
