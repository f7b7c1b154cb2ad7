import contextlib


class FP8GlobalStateManager: ...


fp8_autocast = contextlib.nullcontext
