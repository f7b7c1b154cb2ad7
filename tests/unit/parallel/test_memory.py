"""The weights of a teacher live on the host between its turns."""

import torch

from grpo_mcore.parallel.memory import WeightsOffload
from grpo_mcore.parallel.platform import Platform


def test_weights_that_do_not_train_are_copied_to_the_host_once() -> None:
    weights = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    before, homes = [weight.detach().clone() for weight in weights], [weight.data_ptr() for weight in weights]
    offload = WeightsOffload(weights, Platform("cpu"))
    offload.offload()
    room = [weight.data_ptr() for weight in weights]
    assert not set(room) & set(homes)
    offload.onload(torch.device("cpu"))
    assert not {weight.data_ptr() for weight in weights} & set(room), "the room stays filled"
    assert all(weight.equal(was) for weight, was in zip(weights, before, strict=True))
    offload.offload()
    assert [weight.data_ptr() for weight in weights] == room
