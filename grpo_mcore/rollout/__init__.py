"""The parts of a rollout: requests, turns, trajectories, scores, and the schedule that asks for them."""
