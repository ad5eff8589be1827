"""The process that starts sandboxes, so that the trainer, with its memory and threads, forks none.

It is a script of its own, imports nothing but the standard library (and sandlock, where that keeps
the code in), sees nothing of the trainer's environment, and lives until the trainer closes the
socket on descriptor 0, or dies. For each sandbox it gets two sockets: the guest's own, and one whose
end means "kill it". It forks a warden, which makes the private folder, starts the guest behind the
provider's walls, looks at the memory of all that runs there, and at the end kills every descendant
and deletes the folder.

As root it gives each sandbox a user of its own, which owns nothing else on the machine. Where it may
mount (as root, or by a user namespace), the private folder is a file system in memory over /tmp that
nobody else sees, and what cannot be reached otherwise (an interpreter under /root) is bound,
read-only, beside it. Elsewhere the folder lies on the disk.
"""

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 32, 4096
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_FIRST_USER, _NUM_USERS = 1_800_000_000, 100_000_000
_LOOK_S = 0.2
_OWN_BYTES = 64 * 1024**2
"""What guest and provider may use themselves."""
_OWN_PROCESSES = 2
"""Guest and interpreter; bubblewrap's own stand in another user namespace."""
_SUPERVISOR_THREADS = 8
"""Of sandlock, beside one for each core."""
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_SEEN = ("/usr", "/etc", "/dev", "/proc", "/tmp", "/mnt")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Start sandboxes until the trainer closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for wardens
    house = House(json.loads(sys.argv[1]))
    asked = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1, 2)
        if not message:
            break
        house.num_started += 1
        if os.fork() == 0:
            asked.close()
            try:
                Warden(house, *descriptors).keep()
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
    house.leave()


def _check(done, what):
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class House:
    """The folder of all sandboxes of one keeper, and what their code sees of the machine.

    Args:
        settings: See `agentrl.sandbox.settings.keeper_settings`.
    """

    def __init__(self, settings):
        self.settings = settings
        self.num_started = 0
        self.is_root = os.geteuid() == 0
        base = settings["base"]
        _own_folder(base, 0o711 if self.is_root else 0o700)
        _sweep(base)
        self.folder = os.path.join(base, f"{os.getpid()}-{time.time_ns()}")
        os.mkdir(self.folder, 0o711)
        # Held by every process of this keeper: while one lives, nobody sweeps the folder.
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if settings["provider"] == "sandlock":
            sys.path.append(settings["sandlock_folder"])
            import sandlock  # noqa: F401 - once, and not in every warden

    def leave(self):
        """Wait for the wardens and delete the folder."""
        try:
            os.wait()  # with SIGCHLD ignored: until there are none
        except ChildProcessError:
            pass
        shutil.rmtree(self.folder, ignore_errors=True)


def _own_folder(path, mode):
    """Make a folder, or find that it is ours: in a common /tmp somebody may have been faster."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise
    os.chmod(path, mode)


def _sweep(base):
    """Delete the folders of keepers that are no more."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_ctime > 1:  # not one that just begins
                delete(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def delete(path):
    """Delete a folder, whatever code did to its modes; a link is never followed."""

    def open_up(_, broken, __):
        parent = os.path.dirname(broken)
        for each in (parent, broken):
            if not os.path.islink(each) and os.path.isdir(each):
                os.chmod(each, 0o700)
        if os.path.isdir(broken) and not os.path.islink(broken):
            shutil.rmtree(broken, ignore_errors=True)
        else:
            os.unlink(broken)

    try:
        shutil.rmtree(path, onerror=open_up)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _is_open(path):
    """Whether everybody may go down to a folder."""
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        path = os.path.dirname(path)
    return True


class Warden:
    """Keeps one sandbox, from its folder to its last process.

    Args:
        house: Where its folder is made.
        talk: The guest's socket.
        control: Its end means "kill it"; what went wrong is written to it.
    """

    def __init__(self, house, talk, control):
        self._house, self._talk, self._control = house, talk, control
        self._settings = house.settings
        number = os.getppid() * 4096 + house.num_started
        self._user = _FIRST_USER + number % _NUM_USERS if house.is_root else None
        if self._settings["provider"] == "subprocess":
            self._user = None
        self._folder = os.path.join(house.folder, str(house.num_started))
        self._private = os.path.join(self._folder, "tmp")
        self._storage = os.path.join(self._folder, "storage")

    def keep(self):
        """Start it, watch it, and clear it away."""
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for path in (self._folder, self._private, self._storage):
            os.mkdir(path, 0o700)
            if self._user is not None:
                os.chown(path, self._user, self._user)
        errors, far_errors = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(errors)
            self._start(far_errors)
        for descriptor in (self._talk, far_errors):
            os.close(descriptor)
        try:
            told = self._watch(pid, errors)
        finally:
            kill_descendants()
            delete(self._folder)
        try:
            os.write(self._control, told)
        except OSError:
            pass  # nobody asks any more

    def _start(self, errors):
        """Become the provider, in the forked process."""
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for descriptor, number in ((self._talk, 0), (self._talk, 1), (errors, 2)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            os.umask(0o077)
            self._room = make_room(self._settings, self._user, self._private)
            self._become_user()
            os.chdir(self._room.folder)
            PROVIDERS[self._settings["provider"]](self)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _become_user(self):
        if self._user is not None:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        # Both are reset by a change of user: the parent's death must still kill it, and
        # sandlock's supervisor asks for descriptors of its own child.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)

    def _watch(self, pid, errors):
        """Wait for the end of the provider or of the other side; return the last error output."""
        told = b""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (self._control, ended, errors):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)}
            if errors in ready:
                chunk = os.read(errors, 4096)
                told = (told + chunk)[-4096:]
                if not chunk:
                    poll.unregister(errors)
            elif self._control in ready or ended in ready:
                return told
            else:
                self._look_at_memory()

    def _look_at_memory(self):
        running = descendants()
        bound = self._settings["memory_bytes"] + _OWN_BYTES
        if sum(map(resident_bytes, running)) > bound:
            used = {pid: proportional_bytes(pid) for pid in running}
            if sum(used.values()) > bound:
                _kill(max(used, key=used.__getitem__))

    def guest_argv(self, folder, environment):
        """The guest's command line, where folder and interpreter lie as its code sees them."""
        python_home = environment[0]
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        library = os.path.join(python_home, "lib", version)
        packages = [(f"{path}/", "") for path in environment[1:]]
        hidden = [*packages, (f"{library}/", ""), (f"{folder}/", ""), (python_home, "")]
        limits = self._settings["limits"]
        rlimits = {**limits["rlimits"], **self._process_limit()}
        told = json.dumps({**limits, "rlimits": rlimits, "hidden": hidden})
        python = os.path.join(python_home, self._settings["executable"])
        return [python, "-I", "-S", "-c", self._settings["guest"], told]

    def _process_limit(self):
        """Bound processes and threads by the kernel's count, where it counts this sandbox alone.

        It counts by user and user namespace, and does not count for root.
        """
        most = self._settings["max_processes"] + _OWN_PROCESSES
        if self._settings["provider"] == "bubblewrap":
            return {"RLIMIT_NPROC": most}
        if self._settings["provider"] == "sandlock" and self._room.is_mounted:
            return {"RLIMIT_NPROC": most + _SUPERVISOR_THREADS + (os.cpu_count() or 1)}
        return {}

    def names(self, folder, environment):
        """The environment variables: all there are."""
        python_home, *packages = environment
        names = {
            "PATH": f"{python_home}/bin:/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return {**names, "PYTHONPATH": ":".join(packages)} if packages else names

    def behind_sandlock(self):
        """Run the guest under Landlock and seccomp."""
        from sandlock import Sandbox, StdioMode

        room = self._room
        system = ["/usr", *_SYSTEM_LINKS, *_SYSTEM_FILES, *_DEVICES]
        sandbox = Sandbox(
            fs_readable=[path for path in system if os.path.exists(path)] + room.environment,
            fs_writable=[room.folder, "/dev/null", *(["/dev/shm"] if room.is_mounted else [])],
            cwd=room.folder,
            clean_env=True,
            env=self.names(room.folder, room.environment),
            max_processes=self._settings["max_processes"] + _OWN_PROCESSES,
            **({} if room.is_mounted else self._on_disk()),
        )
        argv = self.guest_argv(room.folder, room.environment)
        sandbox.popen(argv, *[StdioMode.INHERIT] * 3).wait()

    def _on_disk(self):
        """Let sandlock bound a folder on the disk: it keeps apart what is written."""
        from sandlock import BranchAction

        return {
            "workdir": self._private,
            "fs_storage": self._storage,
            "max_disk": self._settings["disk_bytes"],
            "on_exit": BranchAction.ABORT,
            "on_error": BranchAction.ABORT,
        }

    def behind_bubblewrap(self):
        """Run the guest in namespaces of its own."""
        room = self._room
        environment, binds = [], []
        for number, path in enumerate(room.environment):
            is_system = path == "/usr" or path.startswith("/usr/")
            environment.append(path if is_system else f"/mnt/{number}")
            if not is_system:
                binds += ["--ro-bind", path, environment[-1]]
        argv = [self._settings["bubblewrap"], "--unshare-all", "--unshare-user", "--disable-userns"]
        argv += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        argv += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        argv += ["--ro-bind", "/usr", "/usr", *_system_binds(), *binds, "--proc", "/proc"]
        size = ["--size", str(self._settings["disk_bytes"])]
        argv += ["--bind", "/tmp", "/tmp"] if room.is_mounted else [*size, "--tmpfs", "/tmp"]
        argv += ["--remount-ro", "/", "--chdir", "/tmp"]
        argv += ["--seccomp", str(_in_memory(bytes.fromhex(self._settings["syscall_filter"]))), "--"]
        argv += self.guest_argv("/tmp", environment)
        os.execve(argv[0], argv, self.names("/tmp", environment))

    def behind_nothing(self):
        """Run the guest with limits, and with all that this user may do."""
        room = self._room
        argv = self.guest_argv(room.folder, room.environment)
        os.execve(argv[0], argv, self.names(room.folder, room.environment))


PROVIDERS = {
    "sandlock": Warden.behind_sandlock,
    "bubblewrap": Warden.behind_bubblewrap,
    "subprocess": Warden.behind_nothing,
}


def _in_memory(data):
    """Put bytes where a descriptor reads them, for the program that this process becomes."""
    descriptor = os.memfd_create("data", 0)
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Room:
    """Where the code finds its folder, and what it may read beside the system."""

    def __init__(self, folder, environment, is_mounted):
        self.folder, self.environment, self.is_mounted = folder, environment, is_mounted


def make_room(settings, user, on_disk):
    """Mount the private folder where that is possible; else use the one on the disk."""
    environment = settings["environment"]
    if settings["provider"] == "subprocess":
        return Room(on_disk, environment, is_mounted=False)
    try:
        _go_apart(user)
    except OSError as error:
        closed = [path for path in environment if user is not None and not _is_open(path)]
        if closed:
            raise OSError(f"root alone may enter {closed[0]}, and {error}") from None
        return Room(on_disk, environment, is_mounted=False)
    user = os.geteuid() if user is None else user
    _mount_memory("/mnt", 1024**2, user)
    seen = []
    for number, path in enumerate(environment):
        is_system = path == "/usr" or path.startswith("/usr/")
        seen.append(path if is_system else _bind(path, f"/mnt/{number}"))
    _check(_libc.mount(None, b"/mnt", None, _MS_REMOUNT | _MS_RDONLY, None), "mount /mnt")
    _mount_memory("/tmp", settings["disk_bytes"], user)
    _check(_libc.mount(b"/tmp", b"/dev/shm", None, _MS_BIND, None), "bind /dev/shm")
    if settings["provider"] == "sandlock":
        _hide_the_rest(user)
    return Room("/tmp", seen, is_mounted=True)


def _hide_the_rest(user):
    """Mount nothing over what the code need not see: Landlock refuses to open, not to look."""
    for name in os.listdir("/"):
        path = f"/{name}"
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if is_folder and path not in (*_SYSTEM_LINKS, *_SEEN):
            _mount_memory(path, 4096, user)
            _check(_libc.mount(None, path.encode(), None, _MS_REMOUNT | _MS_RDONLY, None), path)


def _go_apart(user):
    """Enter a mount namespace that nobody else sees: with a user namespace, but for root."""
    me = os.geteuid(), os.getegid()
    apart = _CLONE_NEWNS if user is not None else _CLONE_NEWNS | _CLONE_NEWUSER
    _check(_libc.unshare(apart), "unshare")
    if user is None:
        for name, text in (("setgroups", "deny"), ("uid_map", me[0]), ("gid_map", me[1])):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text if name == "setgroups" else f"{text} {text} 1")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")


def _mount_memory(path, size_bytes, user):
    kind = f"size={size_bytes},nr_inodes={max(1024, size_bytes // 4096)},mode=700,uid={user}"
    flags = _MS_NOSUID | _MS_NODEV
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, kind.encode()), f"mount {path}")


def _bind(path, place):
    """Show a folder elsewhere, read-only."""
    os.mkdir(place, 0o755)
    near, far = path.encode(), place.encode()
    _check(_libc.mount(near, far, None, _MS_BIND | _MS_REC, None), f"bind {path}")
    read_only = _MS_BIND | _MS_REMOUNT | _MS_RDONLY
    _check(_libc.mount(None, far, None, read_only, None), f"bind {path} read-only")
    return place


def _system_binds():
    binds = []
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            binds += ["--ro-bind", path, path]
    for path in _SYSTEM_FILES:
        binds += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        binds += ["--dev-bind", path, path]
    return [*binds, "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]


def descendants():
    """List all processes below this one."""
    found, new = [], [os.getpid()]
    while new:
        new = [child for pid in new for child in _children(pid)]
        found += new
    return found


def _children(pid):
    children = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return children


def resident_bytes(pid):
    """Measure a process's memory, with what it shares."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def proportional_bytes(pid):
    """Measure a process's memory, with its part of what it shares."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return 0
    except PermissionError:
        return resident_bytes(pid)


def kill_descendants():
    """Kill all processes below this one until there is none; orphans come to it."""
    while True:
        for pid in descendants():
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    main()
