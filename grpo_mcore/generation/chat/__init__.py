"""The policy behind an OpenAI-compatible endpoint: engines that speak chat, and an HTTP server in front of them."""
