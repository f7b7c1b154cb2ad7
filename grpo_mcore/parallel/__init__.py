"""The Megatron-Core policy: mesh, model, log-probs, optimizer, checkpoint, and the CPU platform."""
