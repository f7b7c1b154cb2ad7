from torch.nn import Module, Sequential


class FusibleOperation(Module): ...


__all__ = ["FusibleOperation", "Sequential"]
