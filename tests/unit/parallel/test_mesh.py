"""A process joins a mesh, and another one after it."""

import pytest
import torch

from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.mesh import Address, join_mesh, leave_mesh
from grpo_mcore.parallel.platform import Platform
from tests.conftest import end_process_groups


def join() -> None:
    join_mesh(PolicyLayout(1), Address(0, 1, 0, "localhost", 0), 1, 9.0, Platform.detect("cpu"))


def test_what_a_failed_test_leaves_is_ended() -> None:
    join()
    with pytest.raises(ValueError, match="initialize the default process group twice"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert end_process_groups() and not end_process_groups()
    join()
    leave_mesh()
    assert not torch.distributed.is_initialized()
