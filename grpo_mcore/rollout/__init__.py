"""What a rollout is made of: requests, turns, trajectories, scores, and the schedule that asks for them."""
