"""Codex in a subprocess: verifiers' own harness wants a container, which not every machine of the tests has."""

from verifiers.v1.harnesses.codex import CodexHarness

__all__ = ["CodexHere"]


class CodexHere(CodexHarness):
    NEEDS_CONTAINER = False
