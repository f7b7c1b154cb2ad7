"""The `grpo-mcore` command: one small file a verb."""
