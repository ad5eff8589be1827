"""Supervise one sandbox, from its folder to its last process."""

import os
import select
import signal
from contextlib import suppress
from typing import Any, NoReturn

import kernel
from backends import PROVIDERS, LaunchSpec
from filesystem_view import FilesystemView, find_closed_folder, mount_view
from folders import delete
from namespaces import enter_inner, enter_outer
from processes import bound_memory, kill_descendants

_FIRST_USER, _NUM_USERS = 1_800_000_000, 100_000_000
_MEMORY_INTERVAL_S = 0.2
_OWN_BYTES = 64 * 1024**2
"""Memory for the guest and the provider themselves."""
_ERROR_BYTES = 4096


class Supervisor:
    """Runs one sandbox in this process. Its child becomes the provider.

    Args:
        settings: The spawner's settings.
        folder: The folder to make, which is deleted at the end.
        number: The sandbox's number.
        guest: The guest's socket.
        control: The control socket. Its end means "kill it". A line break is written to it for each
            process that is killed for its memory, and the last error at the end.
    """

    def __init__(
        self, settings: dict[str, Any], folder: str, *, number: int, guest: int, control: int
    ) -> None:
        self._settings, self._folder = settings, folder
        self._guest, self._control = guest, control
        self._private = os.path.join(folder, "tmp")
        self._storage = os.path.join(folder, "storage")
        self._has_namespaces = settings["no_namespaces"] is None
        self._user: int | None = None
        """A user for this sandbox alone, who owns nothing else; only root can give it one."""
        if os.geteuid() == 0 and settings["provider"] != "subprocess":
            self._user = _FIRST_USER + 1 + (os.getppid() * 4096 + number) % _NUM_USERS

    def run(self) -> None:
        """Start the sandbox, watch it, and remove everything that it leaves."""
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_blocking(self._control, False)  # a busy trainer must not delay the watch
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        for path in (self._folder, self._private, self._storage):
            os.mkdir(path, 0o700)
        errors, far_errors = os.pipe()
        if self._has_namespaces:
            enter_outer(has_pids=self._settings["has_pids"])
        pid = os.fork()
        if pid == 0:
            self._become_provider(far_errors)
        os.close(self._guest)
        os.close(far_errors)
        message = b""
        try:
            message = self._watch(pid, errors)
        finally:
            kill_descendants()
            with suppress(OSError):  # the next spawner tries again
                delete(self._folder)
            if self._user is not None and not self._has_namespaces:
                _remove_shared_objects(self._user)
        with suppress(OSError):  # the trainer may be gone
            os.write(self._control, message)

    def _become_provider(self, errors: int) -> NoReturn:
        try:
            _die_with_parent()
            for descriptor, number in ((self._guest, 0), (self._guest, 1), (errors, 2)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            os.umask(0o077)
            view = self._make_view()
            if self._user is not None:
                os.setgroups([])
                os.setresgid(self._user, self._user, self._user)
                os.setresuid(self._user, self._user, self._user)
            _die_with_parent()  # the change of user has undone it
            os.chdir(view.folder)
            PROVIDERS[self._settings["provider"]](LaunchSpec(view, self._settings, self._storage))
        except BaseException as error:  # noqa: BLE001 - the end of a forked process
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    def _make_view(self) -> FilesystemView:
        environment, readable = self._settings["environment"], self._settings["readable"]
        if self._has_namespaces:
            enter_inner(has_pids=self._settings["has_pids"])
            return mount_view(environment, readable, self._user, self._settings["disk_bytes"])
        if self._user is not None:
            if (closed := find_closed_folder(environment)) is not None:
                reason = self._settings["no_namespaces"]
                raise OSError(f"root alone may enter {closed}, and {reason}")
            for path in (self._folder, self._private, self._storage):
                os.chown(path, self._user, self._user)
        return FilesystemView(self._private, environment, readable, is_mounted=False)

    def _watch(self, pid: int, errors: int) -> bytes:
        """Wait until the provider or the trainer's end closes; return the last error output."""
        message = b""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (self._control, ended, errors):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_MEMORY_INTERVAL_S * 1000)}
            if errors in ready:
                chunk = os.read(errors, _ERROR_BYTES)
                message = (message + chunk)[-_ERROR_BYTES:]
                if not chunk:
                    poll.unregister(errors)
            elif ready:
                return message
            else:
                bound_memory(self._settings["memory_bytes"] + _OWN_BYTES, self._report_kill)

    def _report_kill(self) -> None:
        """Write that a process is killed for its memory, before the guest can see its end."""
        with suppress(OSError):  # the trainer may be gone
            os.write(self._control, b"\n")


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. A change of user undoes it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # A change of user undoes this too. sandlock's supervisor needs descriptors of its own child.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _remove_shared_objects(user: int) -> None:
    """Remove what sandlock keeps for each user, in a process that becomes this user."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        os.setresuid(user, user, user)
        kernel.remove_shared_objects(user)
    finally:
        os._exit(0)
