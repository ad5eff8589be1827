"""Programs that try to escape from a sandbox. Each probe prints REACHED if it succeeds.

`docs/trust.md` prints the probes with what was measured; a test compares the two.
"""

import asyncio
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from agentrl.agent_loops.agent_program import AgentProgram
from agentrl.agent_loops.agent_record import AgentRecord
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.sandbox import AgentSandboxConfig, SandboxConfig, SandboxProviderName
from agentrl.sandbox import Execution, ExecutionEnd, make_sandbox

MIB = 1024**2
LIMITS = SandboxConfig(
    timeout_s=5.0,
    cpu_s=30,
    memory_bytes=192 * MIB,
    max_processes=8,
    max_open_files=32,
    disk_bytes=8 * MIB,
    num_warm=0,
)
"""What the probes run under."""


@dataclass(frozen=True, slots=True)
class Host:
    """What is outside the sandbox, for the probes to reach."""

    pid: int
    secret: str
    """A file that everybody may read, with `SECRET` in it."""
    outside: str
    """A folder that everybody may write to."""
    tcp_port: int
    udp_port: int
    socket_path: str
    abstract: str

    def fill(self, source: str) -> str:
        """Put the names into a probe's code."""
        head = f"""
import ctypes, os, signal, socket, sys, time
PID, SECRET, OUTSIDE = {self.pid}, {self.secret!r}, {self.outside!r}
TCP, UDP, PATH, ABSTRACT = {self.tcp_port}, {self.udp_port}, {self.socket_path!r}, {self.abstract!r}
MEMORY, DISK = {LIMITS.memory_bytes}, {LIMITS.disk_bytes}
PROCESSES, FILES = {LIMITS.max_processes}, {LIMITS.max_open_files}
libc = ctypes.CDLL(None, use_errno=True)
def goes(work):
    try:
        found = work()
    except (OSError, ValueError) as error:
        return False
    return found is not False
def reached(is_reached):
    print("REACHED" if is_reached else "held", flush=True)
"""
        return head + source


def is_held(done: Execution) -> bool:
    """Whether the probe came to its end and found the wall."""
    return done.is_ok and "held" in done.stdout and "REACHED" not in done.stdout


def is_stopped(*ends: ExecutionEnd) -> Callable[[Execution], bool]:
    """Whether it was stopped before it got there, or held."""
    return lambda done: "REACHED" not in done.stdout and (done.end in ends or is_held(done))


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that hostile code tries."""

    name: str
    what: str
    """As the documentation says it."""
    source: str
    is_contained: Callable[[Execution], bool] = is_held
    timeout_s: float | None = None
    """None: that of the limits."""


_SYSCALLS = """
def call(number, *arguments):
    return libc.syscall(number, *arguments) >= 0
"""
_HOLD = """
PART = 16 * 1024**2
libc.shmat.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
"""
PROBES = (
    Probe(
        "read_files",
        "read the trainer's files",
        "reached(goes(lambda: open(SECRET).read()))",
    ),
    Probe(
        "list_homes",
        "list /root, /home, /etc and the trainer's temporary folder",
        # The path to a Python that the code may use can be in a home.
        "def listed(path): return len(os.listdir(path)) > (path in ('/root', '/home'))\n"
        "paths = ['/root', '/home', '/etc/security', '/etc/default', OUTSIDE]\n"
        "reached(any([goes(lambda: listed(path)) for path in paths]))",
    ),
    Probe(
        "environ",
        "read the trainer's environment",
        "ours = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'PYTHONDONTWRITEBYTECODE', 'PWD',\n"
        "        'LC_ALL', 'TZ', 'TERM', 'NO_PROXY', 'no_proxy'}\n"
        "given = ('AGENTRL_', 'OPENAI_', 'ANTHROPIC_')\n"
        "found = {name for name in set(os.environ) - ours if not name.startswith(given)}\n"
        "print(found)\n"
        "reached(found or goes(lambda: open(f'/proc/{PID}/environ').read()))",
    ),
    Probe(
        "processes",
        "see the machine's processes",
        "reached(goes(lambda: open(f'/proc/{PID}/cmdline').read()))",
    ),
    Probe(
        "look_at_files",
        "learn which of the trainer's files there are, without opening them",
        "reached(goes(lambda: os.stat(SECRET)))",
    ),
    Probe(
        "look_at_processes",
        "learn which numbers of processes there are",
        "reached(goes(lambda: os.stat(f'/proc/{PID}')))",
    ),
    Probe(
        "tcp",
        "connect by TCP",
        "reached(goes(lambda: socket.create_connection(('127.0.0.1', TCP), 2)))",
    ),
    Probe(
        "tcp_around_connect",
        "connect by TCP without `connect` of plain TCP: by MPTCP, by fast open",
        "def fast(flags, *kind):\n"
        "    asking = socket.socket(socket.AF_INET, socket.SOCK_STREAM, *kind)\n"
        "    asking.settimeout(2)\n"
        "    if flags: return asking.sendto(b'x', flags, ('127.0.0.1', TCP)) == 1\n"
        "    asking.connect(('127.0.0.1', TCP))\n"
        "reached(any([goes(lambda: fast(0, 262)), goes(lambda: fast(socket.MSG_FASTOPEN))]))",
    ),
    Probe(
        "tcp_listen",
        "listen by TCP, with an address or without",
        "def listens(address, *kind):\n"
        "    waiting = socket.socket(socket.AF_INET, socket.SOCK_STREAM, *kind)\n"
        "    if address: waiting.bind(address)\n"
        "    waiting.listen()\n"
        "reached(any([goes(lambda: listens(None)), goes(lambda: listens(('0.0.0.0', 0), 262)),\n"
        "             goes(lambda: listens(('127.0.0.1', 0)))]))",
    ),
    Probe(
        "tcp_memory",
        "open TCP sockets, whose memory is one budget of the machine",
        "reached(any([goes(lambda: socket.socket(f)) for f in (socket.AF_INET, socket.AF_INET6)]))",
    ),
    Probe(
        "udp",
        "send by UDP",
        "def answered():\n"
        "    asking = socket.socket(type=socket.SOCK_DGRAM)\n"
        "    asking.settimeout(1)\n"
        "    asking.sendto(b'x', ('127.0.0.1', UDP))\n"
        "    return asking.recv(1) == b'x'\n"
        "reached(goes(answered))",
    ),
    Probe(
        "unix_abstract",
        "connect to an abstract Unix socket",
        "reached(goes(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)))",
    ),
    Probe(
        "unix_path",
        "connect to a Unix socket in a folder",
        "reached(goes(lambda: socket.socket(socket.AF_UNIX).connect(PATH)))",
    ),
    Probe(
        "signal",
        "send a signal to another process",
        "reached(goes(lambda: os.kill(PID, 0)))",
    ),
    Probe(
        "limit_others",
        "change limits, priority or processors of another process",
        _SYSCALLS + "def changes(pid):\n"
        "    cpus = bytes(128)\n"
        "    size = libc.syscall(204, pid, 128, cpus)\n"
        "    return [name for name, numbers in {\n"
        "        'prlimit64': (302, pid, 4, 0, bytes(16)),\n"
        "        'sched_setscheduler': (144, pid, 0, bytes(4)),\n"
        "        'sched_setparam': (142, pid, bytes(4)),\n"
        "        'sched_setattr': (314, pid, bytes([48] + 47 * [0]), 0),\n"
        "        'sched_setaffinity': (203, pid, max(size, 8), cpus),\n"
        "        'setpriority': (141, 0, pid, 0), 'ioprio_set': (251, 1, pid, 0),\n"
        "    }.items() if call(*numbers)]\n"
        "found = changes(PID) + changes(os.getppid())\n"
        "print(found)\n"
        "reached(bool(found))",
    ),
    Probe(
        "write_outside",
        "write outside its folder",
        "def wrote(path): open(os.path.join(path, 'probe'), 'w').write('x')\n"
        "reached(any(goes(lambda: wrote(p)) for p in [OUTSIDE, '/usr', '/', '/dev', '/var/tmp']))",
    ),
    Probe(
        "change_outside",
        "change modes and times outside",
        "ways = [lambda: os.chmod(SECRET, 0o666), lambda: os.chown(SECRET, os.geteuid(), -1),\n"
        "        lambda: os.utime(SECRET, (1, 1)), lambda: os.setxattr(SECRET, 'user.x', b'x')]\n"
        "reached(any([goes(way) for way in ways]))",
    ),
    Probe(
        "symlink",
        "leave the folder by a symbolic or hard link",
        "os.symlink(SECRET, 'a'); os.symlink(OUTSIDE, 'b')\n"
        "def wrote(): open('b/probe', 'w').close(); os.stat(os.path.join(OUTSIDE, 'probe'))\n"
        "reached(goes(lambda: open('a').read()) or goes(wrote)\n"
        "        or goes(lambda: os.link(SECRET, 'c')) and goes(lambda: open('c').read()))",
    ),
    Probe(
        "fill_disk",
        "fill the disk with one file",
        "written = 0\n"
        "with open('big', 'wb', buffering=0) as file:\n"
        "    while written <= DISK and goes(lambda: file.write(bytes(65536))):\n"
        "        written += 65536\n"
        "reached(written > DISK)",
        is_stopped(ExecutionEnd.KILLED),
    ),
    Probe(
        "fill_disk_many",
        "fill the disk with many files",
        "written = 0\n"
        "def write(): open(f'f{written}', 'wb').write(bytes(65536))\n"
        "while written <= DISK and goes(write):\n"
        "    written += 65536\n"
        "reached(written > DISK)",
    ),
    Probe(
        "memory",
        "use more memory than it may",
        "held_back = []\n"
        "for _ in range(40):\n"
        "    held_back.append(b'x' * (MEMORY // 16))\n"
        "reached(True)",
        is_stopped(ExecutionEnd.MEMORY, ExecutionEnd.KILLED),
    ),
    Probe(
        "memory_together",
        "use more memory by many processes",
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        mine = b'x' * (MEMORY // 2)\n"
        "        time.sleep(1.5)\n"
        "        os._exit(7)\n"
        "codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]\n"
        "reached(codes.count(7) * (MEMORY // 2) > 2 * MEMORY)",
        is_stopped(ExecutionEnd.MEMORY, ExecutionEnd.KILLED),
    ),
    Probe(
        "memory_without_a_name",
        "hold memory in files without a name",
        _HOLD + "held = 0\n"
        "def hold():\n"
        "    descriptor = libc.memfd_create(b'x', 0)\n"
        "    return descriptor >= 0 and os.write(descriptor, bytes(DISK)) == DISK\n"
        "while held <= MEMORY // 2 and goes(hold): held += DISK\n"
        "reached(held > MEMORY // 2)",
    ),
    Probe(
        "memory_of_system_v",
        "hold memory in System V's shared memory",
        _HOLD + "made = []\n"
        "def hold():\n"
        "    made.append(libc.shmget(0, PART, 0o1600))\n"
        "    if made[-1] < 0: return False\n"
        "    place = libc.shmat(made[-1], None, 0)\n"
        "    ctypes.memset(place, 1, PART)\n"
        "    return libc.shmdt(ctypes.c_void_p(place)) == 0\n"
        "while len(made) * PART < 2 * MEMORY and goes(hold): pass\n"
        "for each in made: libc.shmctl(each, 0, None)\n"
        "reached(len(made) * PART >= 2 * MEMORY)",
    ),
    Probe(
        "memory_unmapped",
        "hold memory that was mapped shared, and is unmapped but for a page",
        _HOLD + "def hold(descriptor, flags):\n"
        "    place = libc.mmap(None, PART, 3, flags, descriptor, 0)\n"
        "    if place in (None, 2**64 - 1): return False\n"
        "    ctypes.memset(place, 1, PART)\n"
        "    return libc.munmap(place + 4096, PART - 4096) == 0\n"
        "def holds(descriptor, flags):\n"
        "    held = 0\n"
        "    while held < 2 * MEMORY and hold(descriptor, flags): held += PART\n"
        "    return held >= 2 * MEMORY\n"
        "ways = [lambda: holds(-1, 0x21), lambda: holds(-1, 0x23),\n"
        "        lambda: holds(os.open('/dev/zero', os.O_RDWR), 1)]\n"
        "reached(any([goes(way) for way in ways]))",
        is_stopped(ExecutionEnd.MEMORY, ExecutionEnd.KILLED),
    ),
    Probe(
        "memory_of_pipes",
        "lend a pipe its memory, of which the pipe holds more than a limit counts",
        "class Vector(ctypes.Structure):\n"
        "    _fields_ = [('base', ctypes.c_char_p), ('length', ctypes.c_size_t)]\n"
        "lent = Vector(b'x', 1)\n"
        "reached(libc.vmsplice(os.pipe()[1], ctypes.byref(lent), ctypes.c_size_t(1), 0) == 1)",
    ),
    Probe(
        "memory_of_buffers",
        "hold memory in sockets and pipes, beyond the size that they have by default",
        "import fcntl\n"
        "pair, pipe = socket.socketpair(), os.pipe()\n"
        "before = [pair[0].getsockopt(1, option) for option in (7, 8)]\n"
        "def grow(option): pair[0].setsockopt(1, option, 2 * max(before))\n"
        "ways = [lambda o=o: grow(o) for o in (7, 8, 32, 33)]\n"
        "ways.append(lambda: fcntl.fcntl(pipe[1], 1031, 2**20))\n"
        "reached(any([goes(way) for way in ways]))",
    ),
    Probe(
        "message_queues",
        "make message queues, which outlive their process",
        "name = b'agentrl-probe'\n"
        "made = libc.syscall(240, name, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0\n"
        "libc.syscall(241, name)\n"
        "reached(made)",
    ),
    Probe(
        "machine_budgets",
        "take contexts of asynchronous input and output, of which the machine has few",
        _SYSCALLS + "context = ctypes.c_long(0)\n"
        "taken = call(206, 1, ctypes.byref(context))\n"
        "libc.syscall(207, context)\n"
        "reached(taken)",
    ),
    Probe(
        "timers",
        "make timers without end",
        "made, timer = 0, ctypes.c_int()\n"
        "while made < 2000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: made += 1\n"
        "reached(made >= 2000)",
    ),
    Probe(
        "landlock_rules",
        "hold memory in Landlock's rules",
        "reached(libc.syscall(444, ctypes.byref(ctypes.c_uint64(1)), 8, 0) >= 0)",
    ),
    Probe(
        "fork_bomb",
        "start processes without end",
        "made = 0\n"
        "def fork():\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "while made < 64 and goes(fork): made += 1\n"
        "reached(made > 2 * PROCESSES)",
    ),
    Probe(
        "threads",
        "start threads without end",
        "import threading\n"
        "made = 0\n"
        "try:\n"
        "    for _ in range(300):\n"
        "        threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); made += 1\n"
        "except RuntimeError: pass\n"
        "reached(made > 100)",
    ),
    Probe(
        "endless_loop",
        "run for ever",
        "while True: pass",
        is_stopped(ExecutionEnd.TIMEOUT),
        timeout_s=1.0,
    ),
    Probe(
        "endless_print",
        "print without end",
        "text = 'x' * 65536\nwhile True: print(text)",
        is_stopped(ExecutionEnd.KILLED),
    ),
    Probe(
        "open_files",
        "open files without end",
        "files = []\n"
        "while len(files) < 200 and goes(lambda: files.append(open('/dev/null'))): pass\n"
        "reached(len(files) > FILES)",
    ),
    Probe(
        "raise_limits",
        "raise its own limits",
        "import resource\n"
        "reached(goes(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))))",
    ),
    Probe(
        "trace_guest",
        "trace the process that watches it, or read its memory and descriptors",
        "parent = os.getppid()\n"
        "reached(libc.ptrace(16, parent, 0, 0) == 0\n"
        "        or goes(lambda: open(f'/proc/{parent}/mem', 'rb'))\n"
        "        or goes(lambda: os.listdir(f'/proc/{parent}/fd') and False or os.stat(\n"
        "            f'/proc/{parent}/fd/0')))",
    ),
    Probe(
        "mount",
        "mount a file system",
        "reached(libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0)",
    ),
    Probe(
        "remount",
        "make a read-only file system writable",
        "libc.unshare(0x20000)  # so that nothing changes outside\n"
        "paths = [b'/', b'/usr']\n"
        "def read(): paths.extend(line.split()[1] for line in open('/proc/self/mounts', 'rb'))\n"
        "goes(read)\n"
        "reached(any([libc.mount(None, path, None, 32 | 4096, None) == 0 for path in paths]))",
    ),
    Probe(
        "write_programs",
        "change the programs that it runs, or the gateway's socket",
        "def writes(path): os.close(os.open(path, os.O_WRONLY))\n"
        "paths = [sys.executable, os.__file__, '/run/gateway.sock']\n"
        "folders = [os.path.dirname(os.path.realpath(path)) for path in paths]\n"
        "reached(any([goes(lambda: writes(path)) for path in paths])\n"
        "        or any([os.access(folder, os.W_OK) for folder in folders if folder]))",
    ),
    Probe(
        "without_a_filter",
        "run without a filter of system calls",
        "reached(libc.prctl(21, 0, 0, 0, 0) != 2)",
    ),
    Probe(
        "new_privileges",
        "gain privileges from a program that has them",
        "reached(libc.prctl(39, 0, 0, 0, 0) != 1)",
    ),
    Probe(
        "list_mounts",
        "list the machine's mounts by `listmount`",
        "class Asked(ctypes.Structure):\n"
        "    _fields_ = [('size', ctypes.c_uint32), ('spare', ctypes.c_uint32),\n"
        "                ('mount', ctypes.c_uint64), ('parameter', ctypes.c_uint64)]\n"
        "asked = Asked(24, 0, 2**64 - 1, 0)\n"
        "reached(libc.syscall(458, ctypes.byref(asked), (ctypes.c_uint64 * 64)(), 64, 0) > 0)",
    ),
    Probe(
        "watch_files",
        "be notified when somebody uses the system's files",
        "watching = libc.inotify_init1(0)\n"
        "reached(watching >= 0 and libc.inotify_add_watch(watching, b'/usr', 32) >= 0)",
    ),
    Probe(
        "user_namespace",
        "open a user namespace",
        "reached(libc.unshare(0x10000000) == 0)",
    ),
    Probe(
        "become_root",
        "become root",
        "goes(lambda: os.setuid(0))\n"
        "def is_mighty(): return int(next(line.split()[1] for line in open('/proc/self/status')\n"
        "    if line.startswith('CapEff')), 16) > 0\n"
        "reached(os.geteuid() == 0 or goes(is_mighty))",
    ),
    Probe(
        "kernel_interfaces",
        "use bpf, io_uring, keyrings, performance events, userfaultfd",
        _SYSCALLS + "tried = {'bpf': (321, 5, bytes(128), 128), 'io_uring': (425, 1, bytes(120)),\n"
        "    'keyctl': (250, 0, -1, 1), 'perf': (298, bytes(128), 0, -1, -1, 0),\n"
        "    'userfaultfd': (323, 1)}\n"
        "through = [name for name, numbers in tried.items() if call(*numbers)]\n"
        "print(through)\n"
        "reached(bool(through))",
    ),
    Probe(
        "unusual_sockets",
        "open vsock, packet and raw sockets",
        "def opened(family, kind): socket.socket(family, kind)\n"
        "reached(any(goes(lambda: opened(*pair)) for pair in [(40, 1), (17, 3), (2, 3)]))",
    ),
)


@contextmanager
def open_host() -> Iterator[Host]:
    """Set up what the probes go for: a readable file, a writable folder, servers that answer."""
    with ExitStack() as stack:
        # Not in /tmp, over which a sandbox has its own; open to all, as a careless user's is.
        outside = tempfile.mkdtemp(dir="/var/tmp")
        stack.callback(shutil.rmtree, outside)
        os.chmod(outside, 0o777)
        secret, path = f"{outside}/secret", f"{outside}/socket"
        with open(secret, "w", encoding="utf-8") as file:
            file.write("SECRET")
        os.chmod(secret, 0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        abstract = f"agentrl-probe-{os.getpid()}"
        for address in (path, f"\0{abstract}"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        os.chmod(path, 0o777)
        threading.Thread(target=_echo, args=(udp,), daemon=True).start()
        ports = tcp.getsockname()[1], udp.getsockname()[1]
        yield Host(os.getpid(), secret, outside, *ports, path, abstract)
        with socket.socket(type=socket.SOCK_DGRAM) as asking:
            asking.sendto(b"end", ("127.0.0.1", ports[1]))


def _echo(udp: socket.socket) -> None:
    with suppress(OSError):
        while (received := udp.recvfrom(8))[0] != b"end":
            udp.sendto(*received)


Use = Literal["session", "program", "agent"]
"""What runs the code: a session, as tools and tests of functions do; a program, as graders and the
judges of code do; an agent."""
USES: tuple[Use, ...] = get_args(Use)
Run = Callable[[str, float | None], Awaitable[Execution]]
AGENT = "import json, sys\nexec(json.load(sys.stdin)['source'], {'__name__': '__main__'})\n"


def run_probes(provider: SandboxProviderName, use: Use = "session") -> dict[str, Execution]:
    """Run every probe in a sandbox of its own, some at a time."""
    config = LIMITS.model_copy(update={"provider": provider, "trusted": True})

    async def run_all(host: Host) -> dict[str, Execution]:
        some = asyncio.Semaphore(4)

        async def run(probe: Probe, run_once: Run) -> Execution:
            async with some:
                return await run_once(host.fill(probe.source), probe.timeout_s)

        async with _agent(config) if use == "agent" else _code(config, use) as run_once:
            done = await asyncio.gather(*(run(probe, run_once) for probe in PROBES))
        return {probe.name: each for probe, each in zip(PROBES, done, strict=True)}

    with open_host() as host:
        return asyncio.run(run_all(host))


@asynccontextmanager
async def _code(config: SandboxConfig, use: Use) -> AsyncIterator[Run]:
    sandbox = make_sandbox(config)

    async def run_session(source: str, timeout_s: float | None) -> Execution:
        session = await sandbox.open_python()
        try:
            return await session.run(source, timeout_s=timeout_s)
        finally:
            await session.close()

    async def run_program(source: str, timeout_s: float | None) -> Execution:
        files = {"main.py": source}
        return await sandbox.run_program(["python", "main.py"], files=files, timeout_s=timeout_s)

    try:
        yield run_session if use == "session" else run_program
    finally:
        await sandbox.close()


@asynccontextmanager
async def _agent(limits: SandboxConfig) -> AsyncIterator[Run]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        script = Path(folder) / "agent.py"
        script.write_text(AGENT, encoding="utf-8")
        script.chmod(0o666)
        given = limits.model_dump(exclude={"timeout_s"})
        if limits.provider == "subprocess":  # which refuses a limit that it cannot keep
            del given["max_processes"]
        sandbox = AgentSandboxConfig(**given)
        config = AgentConfig(command=["python", str(script)], sandbox=sandbox)
        async with Gateway() as gateway:
            agent = AgentProgram(config, [*(config.command or ())], gateway, prints_reward=False)

            async def run(source: str, timeout_s: float | None) -> Execution:
                record = AgentRecord(
                    base_url=f"{gateway.address}/v1",
                    key="key",
                    row={"source": source},
                    model="policy",
                    request_id="r-1",
                    environment={},
                )
                ended = (await agent(record, timeout_s or LIMITS.timeout_s)).run
                return Execution(
                    end=ExecutionEnd(ended.end),
                    stdout=ended.stdout,
                    stderr=ended.stderr,
                    exit_code=ended.exit_code,
                )

            try:
                yield run
            finally:
                await agent.close()


def stopped(provider: SandboxProviderName, use: Use = "session") -> dict[str, bool]:
    """Say of each probe whether it was stopped."""
    done = run_probes(provider, use)
    return {probe.name: probe.is_contained(done[probe.name]) for probe in PROBES}
