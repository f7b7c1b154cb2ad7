"""The system call filter, run by a small BPF interpreter: the kernel's verdict on each call."""

from __future__ import annotations

import errno
import struct

import pytest

from grpo_mcore.environments.code.sandbox.seccomp import filter_program

X86, ARM = 0xC000003E, 0xC00000B7
KILLED, ALLOWED = "killed", "allowed"
EPERM, ENOSYS = errno.EPERM, errno.ENOSYS


def verdict(machine: str, architecture: int, number: int, argument: int = 0) -> str | int:
    """Run the filter. The five instructions are those of the BPF manual."""
    data = struct.pack("<IIQQQQQQQ", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    value, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:  # BPF_RET | BPF_K
            action, detail = operand & 0xFFFF0000, operand & 0xFFFF
            return {0x80000000: KILLED, 0x7FFF0000: ALLOWED}.get(action) or {0x00050000: detail}[action]
        else:  # BPF_JMP | BPF_K with JEQ, JGE, JSET
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize(
    ("name", "x86", "arm", "argument", "expected"),
    [
        ("read", 0, 63, 0, ALLOWED),
        ("execve", 59, 221, 0, ALLOWED),
        ("socketpair", 53, 199, 1, ALLOWED),
        ("socket", 41, 198, 1, EPERM),
        ("ptrace", 101, 117, 16, EPERM),
        ("mount", 165, 40, 0, EPERM),
        ("unshare", 272, 97, 0, EPERM),
        ("bpf", 321, 280, 0, EPERM),
        ("io_uring_setup", 425, 425, 0, EPERM),
        ("memfd_create", 319, 279, 0, EPERM),
        ("clone as fork does", 56, 220, 0x01200011, ALLOWED),
        ("clone as a thread does", 56, 220, 0x003D0F00, ALLOWED),
        ("clone with a user namespace", 56, 220, 0x10000011, EPERM),
        ("clone with a network namespace", 56, 220, 0x40000011, EPERM),
        ("clone3", 435, 435, 0, ENOSYS),
        ("prlimit of itself", 302, 261, 0, ALLOWED),
        ("prlimit of another", 302, 261, 1, EPERM),
        ("the last one known", 449, 449, 0, ALLOWED),
        ("one that came later", 450, 450, 0, ENOSYS),
    ],
)
def test_calls(name: str, x86: int, arm: int, argument: int, expected: str | int) -> None:
    assert verdict("x86_64", X86, x86, argument) == expected
    assert verdict("aarch64", ARM, arm, argument) == expected


def test_another_architectures_calls_end_the_process() -> None:
    assert verdict("x86_64", 0x40000003, 0) == KILLED  # i386 on x86_64
    assert verdict("x86_64", X86, 0x40000000) == KILLED  # x32
    assert verdict("aarch64", X86, 0) == KILLED


def test_another_machine_has_no_filter() -> None:
    with pytest.raises(KeyError):
        filter_program("riscv64")


def test_the_kernel_takes_it() -> None:
    assert len(filter_program("x86_64")) // 8 <= 4096  # BPF_MAXINSNS
