"""Run a command on a lab's host: enter its namespaces, take its name, then become the command.

A program of its own, started as `python -I -S enter.py JSON`, because entering a user namespace needs a
process with a single thread. It uses nothing but the standard library and starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 1 << 19
SO_NETNS_COOKIE = 71

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        sys.stderr.write(f"mlfabric: can't enter the lab's host: {what}: {os.strerror(ctypes.get_errno())}\n")
        sys.exit(126)


def join(path: str, kind: int, what: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        sys.stderr.write(f"mlfabric: can't enter the lab's host: {what}: {error.strerror}\n")
        sys.exit(126)
    check(libc.setns(fd, kind), what)
    os.close(fd)


def main() -> None:
    order = json.loads(sys.argv[1])
    if order.get("user"):
        join(order["user"], CLONE_NEWUSER, "its user namespace")
    join(order["net"], CLONE_NEWNET, "its network namespace")
    if order.get("cookie"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            print(struct.unpack("Q", probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])
        return
    if not os.path.exists(order["hosts"]):
        # The lab is being taken down, and may already have looked for processes inside.
        sys.stderr.write("mlfabric: the lab is going down\n")
        sys.exit(126)
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "a view of its own")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "a view of its own")
    name = order["host"].encode()
    check(libc.sethostname(name, len(name)), "its name")
    if os.path.exists("/etc/hosts"):
        check(libc.mount(order["hosts"].encode(), b"/etc/hosts", None, MS_BIND, None), "/etc/hosts")
    argv = order["argv"]
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"mlfabric: can't run {argv[0]}: {error.strerror}\n")
        sys.exit(127)


main()
