"""Where the process groups of a CPU listen, and what they share."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch.distributed import HashStore, ProcessGroupGloo

from grpo_mcore.base.gloo import gloo_towards, share_gloo_device


def test_gloo_listens_where_the_others_reach_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that what the code sets is taken back at the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    gloo_towards("127.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "on one machine any address will do"
    monkeypatch.setattr("grpo_mcore.base.gloo.address_towards", lambda host: "10.1.2.3")
    monkeypatch.setattr("grpo_mcore.base.gloo.interface_of", {"10.1.2.3": "eth7"}.get)
    gloo_towards("10.1.2.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    gloo_towards("10.1.2.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's"


def test_groups_share_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each list of interfaces; with it, a group keeps its timeout."""
    share_gloo_device()
    share_gloo_device()
    devices = []
    for interfaces in ("", "lo", "lo,lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
        groups = [ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=7)) for _ in range(3)]
        assert {group.options._timeout for group in groups} == {timedelta(seconds=7)}
        first, *others = [group.options._devices for group in groups]
        assert others == [first, first]
        devices += first
    assert len(set(devices)) == 4


def test_a_forked_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    share_gloo_device()
    here = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=7))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    there = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=7))
    assert here.options._devices != there.options._devices


def test_a_group_with_options_of_its_own_keeps_them() -> None:
    share_gloo_device()
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=3)
    group = ProcessGroupGloo(HashStore(), 0, 1, options)
    assert group.options._devices == options._devices and group.options._timeout == timedelta(seconds=3)
