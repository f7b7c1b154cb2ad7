"""The system calls that a sandboxed program may not use, as a filter for the kernel (seccomp-BPF).

Namespaces already hide the machine. The filter refuses what they do not cover, such as sockets of families without
namespaces and memory that no limit counts, and the calls through which kernels get attacked.
"""

import errno
import platform
import struct

# Name: (number on x86_64, number on aarch64); None: it has no such call.
_REFUSED: dict[str, tuple[int, int | None]] = {
    # communication; socketpair is allowed, asyncio needs it
    "socket": (41, 198),
    # memory and queues outside the limits of a process
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # namespaces, mounts, device nodes
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # the machine
    "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None),
    "ioperm": (173, None), "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "quotactl": (179, 60), "vhangup": (153, 58),
    # large and often attacked
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "vmsplice": (278, 75),
    "personality": (135, 92), "modify_ldt": (154, None), "lookup_dcookie": (212, 18),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_NEWER = 450  # calls from here on came after this list
_X32 = 0x40000000  # the second set of numbers of x86_64
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; of the argument, the lower half
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW = 0x80000000, 0x7FFF0000


def filter_program(machine: str = "") -> bytes:
    """Return the filter for this machine, or for `machine` (as platform.machine() writes it): consecutive structs
    sock_filter, as bubblewrap reads them. Refused calls fail with EPERM; clone3 and calls that are newer than the list
    with ENOSYS, after which the C library falls back to older ones. A call of another architecture ends the process.

    Raises KeyError for another machine than x86_64 and aarch64.
    """
    column, architecture = _ARCHITECTURES[machine or platform.machine()]
    refuse, unknown = _error(errno.EPERM), _error(errno.ENOSYS)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _KILL),
        _instruction(_AT_LEAST, _NEWER, 0, 1),
        unknown,
        _instruction(_EQUAL, _CLONE3[column], 0, 1),
        unknown,
        *_if_argument(_CLONE[column], _instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse),
        *_if_argument(_PRLIMIT[column], _instruction(_EQUAL, 0, 1, 0), refuse),  # a process may limit itself
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_instruction(_EQUAL, number, 0, 1), refuse]
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


def _if_argument(call: int, test: bytes, action: bytes) -> list[bytes]:
    """Return `action` for a `call` whose first argument passes the test; the test skips it otherwise."""
    return [
        _instruction(_EQUAL, call, 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        test,
        action,
        _instruction(_LOAD, _NUMBER),
    ]


def _error(number: int) -> bytes:
    return _instruction(_RETURN, 0x00050000 | number)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
