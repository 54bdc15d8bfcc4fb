"""The command line of a machine without POSIX: ``python without_posix.py ARGUMENTS [--then ARGUMENTS]...``.

Names that Python has on Linux alone, or on Linux and macOS, are hidden from vitlab.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "nis", "spwd", "crypt", "readline"]
OF_OS = [
    "fork", "forkpty", "register_at_fork", "killpg", "getpgid", "getpgrp", "setpgid", "getsid", "setsid", "getuid", "geteuid",
    "getgid", "getegid", "getgroups", "getresuid", "uname", "sysconf", "confstr", "getloadavg", "nice", "getpriority",
    "sched_getaffinity", "sched_setaffinity", "sched_yield", "pread", "pwrite", "preadv", "pwritev", "sendfile", "pidfd_open",
    "statvfs", "fstatvfs", "mkfifo", "mknod", "chown", "lchown", "fchown", "fchmod", "chroot", "sync", "wait", "wait3", "wait4",
    "posix_fadvise", "posix_fallocate", "posix_spawn", "lockf", "openpty", "ctermid", "eventfd", "memfd_create",
    "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "O_SYNC", "O_NOCTTY",
]  # fmt: skip
OF_SIGNAL = [
    "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGSTOP", "SIGCONT", "SIGTSTP", "SIGPIPE",
    "SIGWINCH", "SIGXCPU", "SIGXFSZ", "pthread_sigmask", "pthread_kill", "pidfd_send_signal", "alarm", "setitimer", "sigwait",
    "sigpending", "SIG_BLOCK", "SIG_UNBLOCK", "SIG_SETMASK", "siginterrupt",
]  # fmt: skip


def hide() -> None:
    """Hide the names from vitlab; libraries, which were built for this machine, keep them."""
    imported = builtins.__import__

    def import_(name: str, globals: Any = None, *rest: Any, **options: Any) -> Any:
        if name in MODULES and str((globals or {}).get("__name__")).startswith("vitlab"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return imported(name, globals, *rest, **options)

    builtins.__import__ = import_
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL), (time, ["tzset"])):
        hidden = {name: vars(module)[name] for name in names if hasattr(module, name)}
        for name in hidden:
            delattr(module, name)

        def attribute(name: str, hidden: Mapping[str, Any] = hidden) -> Any:
            if name in hidden and not sys._getframe(1).f_globals["__name__"].startswith("vitlab"):
                return hidden[name]
            raise AttributeError(name)

        module.__getattr__ = attribute  # type: ignore[attr-defined]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]  # type: ignore[assignment]


def main() -> None:
    """Run the commands one after another, and end with the first exit code that is not 0."""
    hide()
    from vitlab import cli

    words, commands = sys.argv[1:], list[list[str]]()
    while "--then" in words:
        at = words.index("--then")
        commands, words = [*commands, words[:at]], words[at + 1 :]
    for arguments in [*commands, words]:
        sys.argv = ["vitlab", *arguments]
        try:
            cli.main()
        except SystemExit as exit_:
            if exit_.code:
                sys.exit(exit_.code)


if __name__ == "__main__":
    main()
