"""What runs inside a sandbox, ahead of the code: it starts interpreters, shells and programs there.

It is sent into the sandbox as text and imports nothing but the standard library. It reads requests
from descriptor 0, runs one at a time in a process of its own, reads what that writes, cuts it, ends
it when its time is up, and writes one answer to descriptor 1. A frame is a length of four bytes,
big-endian, and JSON.

The code never holds descriptors 0 and 1, and may neither trace this process nor look into it: how
a program ended is what the kernel told this process. What a Python session says of itself (that
the code raised, and what) comes from the interpreter that the code shares, and is the code's word.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_HEAD = struct.Struct(">I")
_CHUNK = 65536
_FLOOD_FACTOR = 256
"""What writes this often the output that is kept is killed, since nobody will read it."""
_TRACEBACK_CHARS = 8192
_SOURCE = "<code>"


def main() -> None:
    """Answer requests until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guest = Guest(json.loads(sys.argv[1]))
    guest.prepare()
    write_frame(1, {"ready": True})
    while (asked := read_frame(0)) is not None:
        write_frame(1, guest.answer(asked))
    guest.kill_all()


def read_frame(descriptor):
    """Read one frame; None at the end."""
    head = _read_exactly(descriptor, _HEAD.size)
    body = None if head is None else _read_exactly(descriptor, _HEAD.unpack(head)[0])
    return None if body is None else json.loads(body)


def _read_exactly(descriptor, size):
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def write_frame(descriptor, record):
    """Write one frame."""
    body = json.dumps(record).encode()
    data = memoryview(_HEAD.pack(len(body)) + body)
    while data:
        data = data[os.write(descriptor, data) :]


class Guest:
    """Holds the interpreter of a session, and runs one request at a time.

    Args:
        limits: What the code may use, as the keeper sends it.
    """

    def __init__(self, limits):
        self.limits = limits
        self.interpreter = None
        self.was_lost = False

    def prepare(self):
        """Start the interpreter ahead of its first request."""
        self.interpreter = self.interpreter or Interpreter(self.limits)

    def answer(self, asked):
        """Do what is asked."""
        if asked["op"] == "python":
            return self._run_python(asked)
        argv, stdin = asked.get("argv"), asked.get("stdin", "")
        if asked["op"] == "shell":
            argv = ["/bin/sh", "-c", asked["source"]]
        self._drop_interpreter()
        try:
            write_files(asked.get("files", {}))
            program = Program([*own_interpreter(argv, self.limits)], stdin, self.limits)
        except (OSError, ValueError) as error:
            return {"end": "error", "stderr": f"{argv[0]}: {told(error)}\n", "exit_code": 127}
        watch = Watch(program.outputs, None, asked["timeout_s"], self.limits)
        watch.until(program.has_ended)
        self.kill_all()
        return program.answer(watch)

    def _run_python(self, asked):
        note = asked.get("note", "")
        if self.interpreter is None and self.was_lost:
            note += "[a new interpreter: names are gone, files are still there]\n"
        self.prepare()
        answer = self.interpreter.run(asked, note)
        if not self.interpreter.is_alive:
            self._drop_interpreter()
            self.was_lost = True
        return answer

    def _drop_interpreter(self):
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None
            self.kill_all()

    def kill_all(self):
        """Kill all that runs here but this process, and wait for it."""
        while True:
            if self.limits["is_alone"]:
                _kill(-1)
            else:
                for pid in _children():
                    _kill(pid)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def told(error):
    """Say what an OSError says, without paths of the machine."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def own_interpreter(argv, limits):
    """Put this interpreter in the place of the name `python`."""
    if argv[0] in ("python", "python3"):
        return [sys.executable, "-S", "-s", *argv[1:]]
    return argv


def write_files(files):
    """Write texts into the folder, and nowhere else."""
    for name, text in files.items():
        if os.path.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"{name}: a path inside the folder was expected")
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)


def bind_limits(limits):
    """Bind the limits to this process and all that it starts; they cannot be raised again."""
    for name, value in limits["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # A second between the soft and the hard limit: the soft one tells what happened.
        extra = 1 if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else 0
        resource.setrlimit(kind, (value, value + extra))


class Watch:
    """Reads what a process writes, keeps the first of it, and knows when time is up.

    Args:
        outputs: Descriptors of its output and its error output, not blocking.
        answers: A descriptor on which an answer may come, or None.
        timeout_s: Seconds.
        limits: Of the output.
    """

    def __init__(self, outputs, answers, timeout_s, limits):
        self.outputs, self.answers = outputs, answers
        self.texts = {descriptor: bytearray() for descriptor in outputs}
        self.max_bytes = limits["max_output_bytes"]
        self.num_bytes = 0
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.open = set(outputs)

    @property
    def seconds(self):
        return time.monotonic() - self.started

    @property
    def is_late(self):
        return time.monotonic() >= self.deadline

    @property
    def is_flooded(self):
        return self.num_bytes > _FLOOD_FACTOR * self.max_bytes

    @property
    def num_cut(self):
        return self.num_bytes - sum(map(len, self.texts.values()))

    def until(self, is_done):
        """Read until it is done, its time is up or it writes without end."""
        while not (is_done() or self.is_late or self.is_flooded):
            self._wait()
        self.drain()

    def _wait(self):
        extra = [] if self.answers is None else [self.answers]
        # A program that closes its output is looked after in steps: its end wakes nobody.
        step = 0.005 if not self.open else 0.05
        left = max(0.0, self.deadline - time.monotonic())
        for descriptor in select.select([*self.open, *extra], [], [], min(step, left))[0]:
            if descriptor != self.answers:
                self._read(descriptor)

    def drain(self):
        """Read what is in the pipes now."""
        while not self.is_flooded and any([self._read(each) for each in list(self.open)]):
            pass

    def _read(self, descriptor):
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.open.discard(descriptor)
            return False
        kept = sum(map(len, self.texts.values()))
        self.texts[descriptor] += chunk[: max(0, self.max_bytes - kept)]
        self.num_bytes += len(chunk)
        return True

    def told(self):
        """Say what was read, as an answer says it."""
        stdout, stderr = (self.texts[d].decode(errors="replace") for d in self.outputs)
        if self.is_late:
            stderr += "[killed: its time was up]\n"
        elif self.is_flooded:
            stderr += f"[killed: it wrote more than {_FLOOD_FACTOR * self.max_bytes} bytes]\n"
        return {
            "stdout": stdout,
            "stderr": stderr,
            "seconds": self.seconds,
            "num_cut_bytes": self.num_cut,
        }


def output_pipe():
    """Open a pipe of which the near end does not block."""
    near, far = os.pipe()
    os.set_blocking(near, False)
    return near, far


def become(limits, stdin, stdout, stderr):
    """Make a forked process one that code may have: its limits, its descriptors, no others."""
    os.setpgid(0, 0)
    for near, descriptor in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(near, descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    bind_limits(limits)


def how_it_died(status, usage, limits):
    """Tell the end of a process that did not end by itself, and say it."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    used_s = usage.ru_utime + usage.ru_stime
    if number == signal.SIGXCPU or (
        number == signal.SIGKILL and used_s >= limits["rlimits"]["RLIMIT_CPU"]
    ):
        return "cpu", "[killed: its CPU seconds were used up]\n"
    if number:
        return "killed", f"[killed by {signal.Signals(number).name}]\n"
    return "killed", f"[the interpreter was ended with exit code {os.WEXITSTATUS(status)}]\n"


class Program:
    """One program, from its start to its end."""

    def __init__(self, argv, stdin, limits):
        self.limits = limits
        self.status = self.usage = None
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self.outputs = (out, err)
        source = _text_file(stdin)
        self.pid = os.fork()
        if self.pid == 0:
            _run_forked(lambda: self._exec(argv, source, far_out, far_err))
        for descriptor in (far_out, far_err, source):
            os.close(descriptor)

    def _exec(self, argv, source, far_out, far_err):
        become(self.limits, source, far_out, far_err)
        os.closerange(3, self.limits["rlimits"]["RLIMIT_NOFILE"])
        try:
            os.execvp(argv[0], argv)
        except (OSError, ValueError) as error:
            os.write(2, f"{argv[0]}: {told(error)}\n".encode(errors="replace"))
            os._exit(127)

    def has_ended(self):
        """Look whether it has ended."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status, self.usage = status, usage
        return self.status is not None

    def answer(self, watch):
        """Say what came of it."""
        for descriptor in self.outputs:
            os.close(descriptor)
        told = watch.told()
        if self.status is None:
            return {**told, "end": "timeout" if watch.is_late else "killed"}
        if not os.WIFEXITED(self.status):
            end, note = how_it_died(self.status, self.usage, self.limits)
            return {**told, "end": end, "stderr": told["stderr"] + note}
        code = os.WEXITSTATUS(self.status)
        last = told["stderr"].rstrip().rpartition("\n")[2]
        end = "ok" if code == 0 else "memory" if last.startswith("MemoryError") else "error"
        return {**told, "end": end, "exit_code": code}


def _text_file(text):
    """Open what a program reads: a file that has no name any more."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY)
    name = ".stdin"
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    descriptor = os.open(name, os.O_RDONLY)
    os.unlink(name)
    return descriptor


def _run_forked(work):
    """Run what a forked process is for, and never return into the guest's own code."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class Interpreter:
    """One Python interpreter with one set of names."""

    def __init__(self, limits):
        self.limits = limits
        self.is_alive = True
        self.number = 0
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self.outputs = (out, err)
        far_requests, self.requests = os.pipe()
        self.answers, far_answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            near = (out, err, self.requests, self.answers)
            far = (far_out, far_err, far_requests, far_answers)
            _run_forked(lambda: _be_interpreter(limits, near, far))
        for descriptor in (far_out, far_err, far_requests, far_answers):
            os.close(descriptor)

    def run(self, asked, note):
        """Run code in it and say what came of it."""
        self.number += 1
        watch = Watch(self.outputs, self.answers, asked["timeout_s"], self.limits)
        try:
            write_frame(self.requests, {"number": self.number, "source": asked["source"]})
        except BrokenPipeError:
            pass  # it died between two calls: its answer's end tells
        self.said = None
        self._late = bytearray()
        watch.until(self._has_answered)
        told = watch.told()
        told["stderr"] = note + told["stderr"]
        if self.said is None:
            return self._died(told, watch)
        told["stderr"] += self.said["error"]
        return {**told, "end": self.said["end"]}

    def _has_answered(self):
        """Take a frame of the interpreter's, where one has come whole; drop what is not one."""
        while self.is_alive and select.select([self.answers], [], [], 0)[0]:
            chunk = os.read(self.answers, _CHUNK)
            self.is_alive = bool(chunk)
            self._late += chunk
            if len(self._late) > 16 * _TRACEBACK_CHARS:
                self.is_alive = False
            elif self._take():
                return True
        return not self.is_alive

    def _take(self):
        while len(self._late) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack(self._late[: _HEAD.size])[0]
            if len(self._late) < end:
                return False
            body = bytes(self._late[_HEAD.size : end])
            del self._late[:end]
            self.said = _as_said(body, self.number)
            if self.said is not None:
                return True
        return False

    def _died(self, told, watch):
        self.is_alive = False
        if watch.is_late:
            return {**told, "end": "timeout"}
        _kill(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        if watch.is_flooded:
            return {**told, "end": "killed"}
        end, note = how_it_died(status, usage, self.limits)
        return {**told, "end": end, "stderr": told["stderr"] + note}

    def close(self):
        """Close its pipes; who calls kills."""
        for descriptor in (*self.outputs, self.requests, self.answers):
            os.close(descriptor)


def _as_said(body, number):
    """Check what an interpreter says: hostile code may have said it."""
    try:
        said = json.loads(body)
        if said["number"] == number and said["end"] in ("ok", "error", "memory"):
            return {"end": said["end"], "error": str(said["error"])[-_TRACEBACK_CHARS:]}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _be_interpreter(limits, near, far):
    """Run code in one set of names until the other end closes: the life of the forked process."""
    out, err, requests, answers = far
    for descriptor in near:
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    become(limits, null, out, err)
    for descriptor in (null, out, err):
        os.close(descriptor)
    sys.argv = [""]
    sys.path[:0] = [""]
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    pid = os.getpid()
    while (asked := read_frame(requests)) is not None:
        end, error = _execute(asked["source"], names, limits["hidden"])
        if os.getpid() != pid:
            os._exit(0)  # the code forked, and this is the copy
        write_frame(answers, {"number": asked["number"], "end": end, "error": error})
    os._exit(0)


def _execute(source, names, hidden):
    import linecache

    # What a traceback shows of the code's lines.
    linecache.cache[_SOURCE] = (len(source), None, source.splitlines(True), _SOURCE)
    try:
        exec(compile(source, _SOURCE, "exec"), names)
        return "ok", ""
    except SystemExit as error:
        is_ok = error.code in (None, 0)
        return ("ok", "") if is_ok else ("error", f"SystemExit: {error.code}\n")
    except MemoryError as error:
        return "memory", _shown(error, hidden)
    except BaseException as error:
        return "error", _shown(error, hidden)
    finally:
        _flush()


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the code closed it, or put something else in its place


def _shown(error, hidden):
    """Show a traceback from the code's own lines on, without paths of the machine."""
    try:
        behind = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, behind))
    except BaseException as broken:
        text = f"{type(error).__name__} (it cannot be shown: {type(broken).__name__})\n"
    for path, name in hidden:
        text = text.replace(path, name)
    return text[-_TRACEBACK_CHARS:]


if __name__ == "__main__":
    main()
