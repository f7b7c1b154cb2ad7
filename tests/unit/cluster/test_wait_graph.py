"""The watchdog's words: who waits for whom, and who keeps them waiting."""

from __future__ import annotations

from grpo_mcore.cluster.wait_graph import Wait, wait_graph

IN_REDUCE = """  File "/lib/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/app/policy.py", line 12 in train_step"""
AT_WORK = """  File "/app/data.py", line 7 in read
  File "/app/policy_worker.py", line 40 in receive"""


def test_the_rank_that_is_not_in_the_collective_is_the_culprit() -> None:
    waits = [
        Wait("engine-0", "samples of step 3", 4.2, late=False),
        Wait("policy-0", "training", 61.0, late=True),
        Wait("policy-1", "training", 61.0, late=True),
    ]
    told = wait_graph(waits, {"policy-0": IN_REDUCE, "policy-1": AT_WORK, "engine-0": ""})
    assert told.splitlines() == [
        "who waits for whom:",
        "  the driver waits for policy-0: training, for 61 s, past its deadline",
        "  the driver waits for policy-1: training, for 61 s, past its deadline",
        "  the driver waits for engine-0: samples of step 3, for 4 s",
        "  engine-0 runs no Python of its own",
        "  policy-0 waits for its group in wrapper",
        "  policy-1 is at /app/data.py:7 in read",
        "culprit: policy-1",
    ]


def test_where_all_are_in_a_collective_none_is_accused() -> None:
    told = wait_graph([Wait(f"policy-{rank}", "training", 9, late=True) for rank in (0, 1)], dict.fromkeys(
        ("policy-0", "policy-1"), IN_REDUCE))  # fmt: skip
    assert told.endswith("culprit: none of policy-0, policy-1 alone: each waits for another in a collective")


def test_a_process_that_is_gone_is_the_culprit() -> None:
    told = wait_graph([Wait("engine-0", "health", 60, late=True)], {"engine-0": None})
    assert "engine-0 does not tell what it is doing: its process has ended" in told and told.endswith("engine-0")
