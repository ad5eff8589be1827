"""Keeps one sandbox, from its folder to its last process."""

import os
import select
import signal
from contextlib import suppress
from typing import Any, NoReturn

import kernel
from backends import PROVIDERS, Order
from filesystem_view import Room, find_closed, make_room
from folders import delete
from namespaces import enter_inner, enter_outer
from processes import bound_memory, kill_descendants

_FIRST_USER, _NUM_USERS = 1_800_000_000, 100_000_000
_LOOK_S = 0.2
_OWN_BYTES = 64 * 1024**2
"""What guest and provider may use themselves."""
_TOLD_BYTES = 4096


class Supervisor:
    """The process beside one sandbox. It has a child, which becomes the provider.

    Args:
        settings: The keeper's.
        folder: Made here, and deleted at the end.
        number: Of the sandbox.
        talk: The guest's socket.
        control: Its end means "kill it"; what went wrong is written to it.
    """

    def __init__(
        self, settings: dict[str, Any], folder: str, *, number: int, talk: int, control: int
    ) -> None:
        self._settings, self._folder = settings, folder
        self._talk, self._control = talk, control
        self._user = self._own_user(os.getppid() * 4096 + number)
        self._private = os.path.join(folder, "tmp")
        self._storage = os.path.join(folder, "storage")

    def _own_user(self, number: int) -> int | None:
        """Give each sandbox of root's a user who owns nothing else."""
        if os.geteuid() != 0 or self._settings["provider"] == "subprocess":
            return None
        return _FIRST_USER + 1 + number % _NUM_USERS

    def keep(self) -> None:
        """Start it, watch it, and clear it away."""
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        for path in (self._folder, self._private, self._storage):
            os.mkdir(path, 0o700)
        errors, far_errors = os.pipe()
        if self._has_namespaces:
            enter_outer(has_pids=self._settings["has_pids"])
        pid = os.fork()
        if pid == 0:
            self._become_provider(far_errors)
        os.close(self._talk)
        os.close(far_errors)
        told = b""
        try:
            told = self._watch(pid, errors)
        finally:
            kill_descendants()
            with suppress(OSError):  # the next keeper tries again
                delete(self._folder)
            if self._user is not None and not self._has_namespaces:
                self._remove_shared_objects(self._user)
        with suppress(OSError):  # nobody may ask any more
            os.write(self._control, told)

    @staticmethod
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

    def _become_provider(self, errors: int) -> NoReturn:
        try:
            self._die_with_parent()
            for descriptor, number in ((self._talk, 0), (self._talk, 1), (errors, 2)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            os.umask(0o077)
            room = self._make_room()
            if self._user is not None:
                os.setgroups([])
                os.setresgid(self._user, self._user, self._user)
                os.setresuid(self._user, self._user, self._user)
            self._die_with_parent()
            os.chdir(room.folder)
            PROVIDERS[self._settings["provider"]](Order(room, self._settings, self._storage))
        except BaseException as error:  # noqa: BLE001 - the end of a forked process
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)

    @staticmethod
    def _die_with_parent() -> None:
        """Bind this process's life to its parent's; a change of user undoes it."""
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # Undone as well; sandlock's supervisor asks for descriptors of its own child.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    @property
    def _has_namespaces(self) -> bool:
        return self._settings["no_namespaces"] is None

    def _make_room(self) -> Room:
        environment = self._settings["environment"]
        if self._has_namespaces:
            enter_inner(has_pids=self._settings["has_pids"])
            return make_room(environment, self._user, self._settings["disk_bytes"])
        if self._user is not None:
            if (closed := find_closed(environment)) is not None:
                reason = self._settings["no_namespaces"]
                raise OSError(f"root alone may enter {closed}, and {reason}")
            for path in (self._folder, self._private, self._storage):
                os.chown(path, self._user, self._user)
        return Room(self._private, environment, is_mounted=False)

    def _watch(self, pid: int, errors: int) -> bytes:
        """Wait for the end of the provider or of the other side; return the last error output."""
        told = b""
        ended = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (self._control, ended, errors):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)}
            if errors in ready:
                chunk = os.read(errors, _TOLD_BYTES)
                told = (told + chunk)[-_TOLD_BYTES:]
                if not chunk:
                    poll.unregister(errors)
            elif ready:
                return told
            else:
                bound_memory(self._settings["memory_bytes"] + _OWN_BYTES)
