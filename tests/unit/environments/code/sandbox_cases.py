"""Attempts of programs against the sandbox, and how each one must end.

An attempt runs to its end and prints what it has got hold of, or "nothing" — unless a limit is to end it.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Any

SECRET = "secret-of-the-parent"


@dataclass(frozen=True)
class Attempt:
    """`program` (with PORT, ABSTRACT, OUTSIDE, PARENT filled in) ends as `how` with a reason that has `reason`
    in it; "exit": by itself, having printed only "nothing"."""

    name: str
    program: str
    how: str = "exit"
    reason: str = ""
    or_else: tuple[str, str] = ("cpu", "processor time limit")
    """Another accepted `how` and `reason`: those of the limit that is reached first on a slow machine."""

    @property
    def needs_proc(self) -> bool:
        """Whether it needs a sandbox with a /proc, without which limits over several processes do not hold."""
        return "/proc" in self.program or self.how == "memory"

    def ended_well(self, ended: Any, trouble: str) -> bool:
        """Whether its limit ended it with that reason, or without a limit it reached nothing."""
        if not self.reason:
            return (ended.how, trouble, ended.stdout) == ("exit", "", "nothing\n")
        return any(ended.how == how and reason in trouble for how, reason in ((self.how, self.reason), self.or_else))

    def source(self, **facts: object) -> str:
        program = dedent(self.program)
        for name, value in facts.items():
            program = program.replace(name, repr(value))
        return PRELUDE + program


PRELUDE = '''\
import errno, glob, os, sys, time
REFUSED = (OSError, ImportError, ValueError, AttributeError)
def tried(*attempts):
    """Print the names of those (name, function, arguments...) that succeed."""
    got = []
    for name, function, *arguments in attempts:
        try:
            result = function(*arguments)
        except REFUSED:
            continue
        if result is not False and result != -1 and result != b"" and result != []:
            got.append((name, repr(result)[:60]))
    print(got or "nothing")
'''

_LIBC = """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
"""

READING = [
    Attempt("reads files of the machine", """
        paths = ["/etc/passwd", "/etc/hostname", "/root/.bashrc", OUTSIDE, "/home", "/var", "/sys/kernel", "/boot"]
        tried(*[(path, lambda path=path: os.listdir(path) if os.path.isdir(path) else open(path).read())
                for path in paths])
        """),
    Attempt("finds the secret in any environment", """
        found = [path for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ")
                 if os.access(path, os.R_OK) and b"secret-of" in open(path, "rb").read()]
        found += ["os.environ"] if any("secret-of" in value for value in os.environ.values()) else []
        print(found or "nothing")
        """),
    Attempt("walks /proc", """
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        others = [pid for pid in pids if pid not in (1, os.getpid())]
        links = [os.readlink(link) for pid in (1, *others) for link in glob.glob(f"/proc/{pid}/fd/*")]
        tried(("others", lambda: others), ("descriptors", lambda: links), ("root", os.listdir, "/proc/1/root"),
              ("cwd", os.listdir, "/proc/1/cwd"), ("memory", open, "/proc/1/mem", "rb"),
              ("maps", lambda: open("/proc/1/maps").read()), ("kcore", open, "/proc/kcore", "rb"),
              ("parent", lambda: PARENT in pids))
        """),
    Attempt("uses descriptors that were left open", """
        def inside(fd):
            target = os.readlink(f"/proc/self/fd/{fd}")
            return False if target.startswith(("pipe:", "/proc/", "/scratch/.input")) else target
        tried(*[(fd, inside, fd) for fd in range(200)], *[(fd, os.listdir, fd) for fd in range(200)])
        """),
    Attempt("imports packages of the machine", """
        names = ["grpo_mcore", "pydantic", "torch", "numpy", "ray", "pip", "sympy"]
        tried(*[(name, __import__, name) for name in names])
        """),
    Attempt("reads the worker by a debugger's means", _LIBC + """
buffer = ctypes.create_string_buffer(64)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine, theirs = Vector(ctypes.addressof(buffer), 64), Vector(0x10000, 64)
tried(("ptrace", libc.ptrace, 16, 1, 0, 0), ("traceme", libc.ptrace, 0, 0, 0, 0),
      ("process_vm_readv", libc.process_vm_readv, 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0),
      ("process_vm_writev", libc.process_vm_writev, 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0),
      ("pidfd_getfd", libc.syscall, 438, libc.syscall(434, 1, 0), 0, 0))
"""),
]  # fmt: skip

WRITING = [
    Attempt("writes outside its folder", """
        folders = ["/", "/etc", "/usr", "/usr/lib", "/dev", "/proc", "/proc/sys/kernel", "/root", "/var/tmp",
                   os.path.dirname(os.__file__), os.path.dirname(sys.executable), os.path.dirname(OUTSIDE)]
        tried(*[(folder, open, folder + "/written", "w") for folder in folders],
              ("worker", open, "/worker.py", "a"), ("python", open, sys.executable, "r+b"),
              ("mkdir", os.mkdir, "/new"), ("core", open, "/proc/sys/kernel/core_pattern", "w"),
              ("oom", open, "/proc/1/oom_score_adj", "w"), ("sysrq", open, "/proc/sysrq-trigger", "w"))
        """),
    Attempt("goes out by a symbolic link", """
        os.symlink("/etc/passwd", "read"); os.symlink("/", "root"); os.symlink("/proc/1/root", "first")
        os.symlink("../../../../../../" + OUTSIDE, "up")
        tried(*[(name, lambda name=name: open(name).read()) for name in ("read", "up")],
              ("written", open, "root/written", "w"), ("passwd", open, "root/etc/passwd"),
              ("first", os.listdir, "first"))
        """),
    Attempt("goes out by a hard link", """
        tried(("worker", os.link, "/worker.py", "linked"), ("python", os.link, sys.executable, "linked"),
              ("null", os.link, "/dev/null", "linked"), ("first", os.link, "/proc/1/exe", "linked"))
        """),
    Attempt("goes up and up", """
        def up():
            here = os.open(".", os.O_RDONLY)
            for _ in range(50):
                os.chdir("..")
            os.fchdir(here) if "etc" not in os.listdir(".") else None
            return [name for name in os.listdir("/") if name in ("etc", "home", "sys", "work", "boot")]
        tried(("up", up))
        """),
    Attempt("mounts", _LIBC + """
os.mkdir("here")
tried(("tmpfs", libc.mount, b"none", b"here", b"tmpfs", 0, None), ("bind", libc.mount, b"/", b"here", None, 4096, None),
      ("remount", libc.mount, None, b"/", None, 32 | 4096, None), ("proc", libc.mount, b"p", b"here", b"proc", 0, None),
      ("umount", libc.umount2, b"/proc", 2), ("fsopen", libc.syscall, 430, b"tmpfs", 0),
      ("open_tree", libc.syscall, 428, -100, b"/", 1))
"""),
    Attempt("changes its root or its namespaces", _LIBC + """
tried(("chroot", os.chroot, "."), ("pivot_root", libc.syscall, 155, b".", b"."),
      *[(hex(flag), libc.unshare, flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000)],
      *[("clone " + hex(flag), libc.syscall, 56, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x20000)],
      ("clone3", libc.syscall, 435, b"\\0" * 88, 88), ("setns", libc.setns, os.open("/proc/self/ns/net", 0), 0))
"""),
    Attempt("makes device nodes", """
        tried(("disk", os.mknod, "disk", 0o60666, os.makedev(254, 0)),
              ("memory", os.mknod, "mem", 0o20666, os.makedev(1, 1)),
              *[(name, open, "/dev/" + name, "rb") for name in ("kmsg", "fuse", "kvm", "tty", "vda", "mem")])
        """),
    Attempt("becomes another user", """
        tried(("root", os.setuid, 0), ("effective", os.seteuid, 0), ("group", os.setgid, 0),
              ("groups", os.setgroups, [0]),
              ("uid map", lambda: open("/proc/self/uid_map", "wb", 0).write(b"0 0 1")))
        """),
]  # fmt: skip

TALKING = [
    Attempt("opens a TCP socket", """
        import socket
        tried(("connect", socket.create_connection, ("127.0.0.1", PORT), 2), ("listen", socket.create_server, ("", 0)),
              ("any", socket.socket), ("six", socket.socket, socket.AF_INET6))
        """),
    Attempt("opens a UDP socket or looks a name up", """
        import socket
        tried(("udp", socket.socket, socket.AF_INET, socket.SOCK_DGRAM), ("name", socket.gethostbyname, "localhost"),
              ("raw", socket.socket, socket.AF_PACKET, socket.SOCK_RAW), ("netlink", socket.socket, 16, 3, 0))
        """),
    Attempt("reaches a Unix socket", """
        import socket
        def connect(address):
            end = socket.socket(socket.AF_UNIX)
            end.connect(address)
            return end
        tried(("abstract", connect, ABSTRACT), ("path", connect, "/var/run/docker.sock"),
              ("descriptors", lambda: socket.socket(fileno=0).getpeername()))
        """),
    Attempt("reaches the hypervisor or the kernel's crypto", """
        import socket
        tried(("vsock", socket.socket, 40, socket.SOCK_STREAM), ("crypto", socket.socket, 38, socket.SOCK_SEQPACKET),
              ("bluetooth", socket.socket, 31, socket.SOCK_RAW, 1))
        """),
    Attempt("uses the kernel's larger machines", _LIBC + """
tried(("bpf", libc.syscall, 321, 0, 0, 0), ("io_uring", libc.syscall, 425, 8, b"\\0" * 120),
      ("userfaultfd", libc.syscall, 323, 0), ("perf", libc.syscall, 298, 0, 0, 0, 0, 0),
      ("keyctl", libc.syscall, 250, 0, -3, 0), ("kexec", libc.syscall, 246, 0, 0, 0, 0),
      ("module", libc.syscall, 175, 0, 0, b""), ("syslog", libc.syscall, 103, 3, 0, 0),
      ("handle", libc.syscall, 304, -100, 0, 0))
"""),
]  # fmt: skip

SIGNALS = [
    Attempt("signals the worker, its parent, everybody", """
        import signal
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGALRM):
            for target in (1, os.getppid(), PARENT):
                try:
                    os.kill(target, number)
                except OSError:
                    pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            os.kill(-1, signal.SIGTERM)
        except OSError:
            pass
        time.sleep(0.05)
        print("nothing")
        """),
    Attempt("raises its limits", """
        import resource
        def more(which):
            resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        names = ["CPU", "DATA", "AS", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK", "STACK"]
        tried(*[(name, more, getattr(resource, "RLIMIT_" + name)) for name in names],
              ("of the worker", resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1)), ("priority", os.nice, -5),
              ("of its priority", os.setpriority, os.PRIO_PROCESS, 1, 19))
        """),
]  # fmt: skip

LIMITS = [
    Attempt("fork bomb", """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """, "cpu", "processor time limit of 1 s"),
    Attempt("fork bomb that dies of it", "while True: os.fork()", "exit", "crashed"),
    Attempt("thread bomb", """
        import threading
        while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """, "exit", "can't start new thread"),
    Attempt("memory bomb", """
        held = []
        while True: held.append("x" * 10**6)
        """, "exit", "MemoryError"),
    Attempt("memory bomb in several processes", """
        for _ in range(6):
            if os.fork() == 0: break
        held = [bytearray(60 * 2**20)]
        time.sleep(30)
        """, "memory", "memory limit of 0.125 GiB"),
    Attempt("memory bomb of shared pages", """
        import mmap
        held = []
        while True:
            held.append(mmap.mmap(-1, 2**24))
            held[-1].write(b"x" * 2**24)
        """, "memory", "memory limit", ("exit", "Cannot allocate memory")),
    Attempt("1 GB of output", """
        while True: os.write(1, b"x" * 2**20)
        """, "output", "output limit of 1 MiB"),
    Attempt("1 GB of errors", """
        while True: os.write(2, b"x" * 2**20)
        """, "output", "output limit of 1 MiB"),
    Attempt("sleeps past the limit", "time.sleep(3600)", "wall", "time limit of 1 s"),
    Attempt("ignores every signal and spins", """
        import signal
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """, "cpu", "processor time limit"),
    Attempt("spins in several processes", """
        for _ in range(3): os.fork()
        while True: pass
        """, "cpu", "processor time limit"),
    Attempt("leaves zombies", """
        for _ in range(40):
            if os.fork() == 0: os._exit(0)
            time.sleep(0.005)
        """, "exit", "BlockingIOError"),
    Attempt("leaves a daemon behind", """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True: time.sleep(0.01)
            os._exit(0)
        os.wait()
        print("nothing")
        """),
    Attempt("closes its output and goes on", """
        print("nothing", flush=True)
        for fd in range(5): os.close(fd)
        time.sleep(3600)
        """, "wall", "time limit"),
    Attempt("fills its folder", """
        with open("full", "wb") as file:
            while True: file.write(b"x" * 2**20)
        """, "exit", "Errno"),
    Attempt("fills its folder by many files", """
        for number in range(10**6):
            with open(f"full{number}", "wb") as file: file.write(b"x" * 2**20)
        """, "exit", "No space left on device"),
    Attempt("fills /dev/shm and /tmp", """
        def fill(path):
            with open(path, "wb") as file:
                for _ in range(64): file.write(b"x" * 2**20)
            return True
        tried(("shm", fill, "/dev/shm/full"), ("tmp", fill, "/tmp/full"), ("dev", fill, "/dev/full2"))
        """),
    Attempt("keeps memory where no limit counts it", _LIBC + """
tried(("memfd", os.memfd_create, "m"), ("secret", libc.syscall, 447, 0), ("shmget", libc.shmget, 0, 2**26, 0o1600),
      ("msgget", libc.msgget, 0, 0o1600), ("mq_open", libc.mq_open, b"/q", 0o102, 0o600, None),
      ("lock", libc.mlockall, 3))
"""),
    Attempt("recursion without end", """
        sys.setrecursionlimit(10**9)
        def deeper(): return [deeper()]
        repr(deeper())
        """, "exit", "crashed"),
    Attempt("recursion in C without end", """
        sys.setrecursionlimit(10**9)
        value = None
        for _ in range(10**6): value = [value]
        repr(value)
        """, "exit", "SIGSEGV"),
    Attempt("exits in a function for the end", """
        import atexit
        atexit.register(os._exit, 0)
        atexit.register(time.sleep, 3600)
        """, "wall", "time limit"),
    Attempt("a thread that does not end", """
        import threading
        threading.Thread(target=time.sleep, args=(3600,)).start()
        """, "wall", "time limit"),
    Attempt("a program that does not compile", "(" * 5000, "exit", "crashed"),
    Attempt("a deep tree of folders", """
        for _ in range(3000):
            os.mkdir("d"); os.chdir("d")
        print("nothing")
        """),
]  # fmt: skip

ATTEMPTS = [*READING, *WRITING, *TALKING, *SIGNALS, *LIMITS]
