"""Predict memory, step time and refit of a recipe before anything is started. Imports neither Megatron-Core nor vLLM
nor Ray, and needs no accelerator."""
