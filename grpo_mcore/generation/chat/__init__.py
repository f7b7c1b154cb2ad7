"""The policy behind an OpenAI-compatible endpoint: chat requests to the engines, and an HTTP server."""
