"""The few system calls the lab needs that Python 3.11 lacks, and what /proc tells about processes.

Network namespaces are known here by a file descriptor, by inode, and by the kernel's cookie; only the
cookie is never used twice while the machine runs, so only it may decide what belongs to a dead lab.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
PR_SET_PDEATHSIG: Final = 1
PR_SET_TIMERSLACK: Final = 29
SO_NETNS_COOKIE: Final = 71
SIOCETHTOOL: Final = 0x8946
TUNSETIFF: Final = 0x400454CA
IFF_TAP: Final = 0x0002
IFF_NO_PI: Final = 0x1000
IFF_VNET_HDR: Final = 0x4000
TUNSETOFFLOAD: Final = 0x400454D0
TUN_F_CSUM: Final = 0x01
TUN_F_TSO4: Final = 0x02
RTM_NEWSTATS: Final = 92
RTM_GETSTATS: Final = 94
NLM_F_REQUEST: Final = 1

# <linux/ethtool.h>: (set, get) of what glues frames together, on the way out and on the way in.
_GLUE_OUT: Final = {"gso": (0x24, 0x23), "tso": (0x1F, 0x1E)}
_GLUE_IN: Final = {"gro": (0x2C, 0x2B)}

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def enter_network(fd: int) -> None:
    """Move this thread into the network namespace behind `fd`."""
    _check(_libc.setns(fd, CLONE_NEWNET), "setns")


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends."""
    parent = os.getppid()
    _check(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() != parent:
        raise SystemExit(1)


def sharpen_timers() -> None:
    """Have waits of this process end on time instead of up to 50 us late."""
    _check(_libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0), "prctl")


def become_root_of_user_namespace() -> None:
    """Enter a fresh user namespace where this user is root; needs a single thread and leave of the kernel."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def new_network_namespace() -> int:
    """Make a network namespace, stay in it, and hold it by the descriptor returned."""
    unshare(CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def network_inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def network_cookie() -> int:
    """The kernel's own never repeated number of the network namespace this thread is in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return int(struct.unpack("Q", probe.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])


def open_tap(name: str) -> int:
    """Make a TAP device of that name in this thread's network namespace; frames come and go by the fd.

    Each comes with a header that says how a piece of several frames is to be cut; a reader that writes both
    to another such device has forwarded the piece whole.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return fd


class ReceivedBytes:
    """Reads what one device has received, in a few microseconds and whatever else its namespace holds."""

    def __init__(self, index: int) -> None:
        """Call it inside the device's namespace."""
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        # nlmsghdr, then if_stats_msg: the device, and that its 64-bit link statistics are wanted.
        self._request = struct.pack("=IHHIIBBHII", 28, RTM_GETSTATS, NLM_F_REQUEST, 1, 0, 0, 0, 0, index, 1)

    def __call__(self) -> int:
        self._netlink.send(self._request)
        reply = self._netlink.recv(4096)
        kind = struct.unpack_from("=H", reply, 4)[0]
        if kind != RTM_NEWSTATS:
            raise OSError("the kernel does not tell link statistics")
        # nlmsghdr (16), if_stats_msg (12), attribute header (4), rx_packets, tx_packets, rx_bytes
        return int(struct.unpack_from("=Q", reply, 16 + 12 + 4 + 16)[0])

    def close(self) -> None:
        self._netlink.close()


def set_offloads(device: str, *, glued: bool) -> None:
    """Whether the device of this thread's namespace may carry several frames of one stream as one piece."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for name, (set_it, get_it) in {**_GLUE_OUT, **_GLUE_IN}.items():
            want = int(glued and name in _GLUE_OUT)
            _ethtool(handle, device, set_it, want)
            if _ethtool(handle, device, get_it, 0) != want:
                raise OSError(f"{name} of {device} can't be switched {'on' if want else 'off'}")


def _ethtool(handle: socket.socket, device: str, command: int, value: int) -> int:
    argument = ctypes.create_string_buffer(struct.pack("II", command, value), 8)
    fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(argument)))
    return int(struct.unpack("II", argument.raw)[1])


def process_ids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def start_ticks(pid: int) -> int | None:
    """When the process started, in ticks since boot; with its number this names it for good. None: gone."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in ("Z", "X"):
        return None
    return int(fields[19])


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_of(pid: int) -> int | None:
    """The inode of the network namespace that a process is in; None if it is gone, or not ours to see."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def processes_in(inodes: Iterable[int]) -> dict[int, int]:
    """Living processes whose network namespace has one of these inodes: pid to inode, without ourselves."""
    wanted = set(inodes)
    found: dict[int, int] = {}
    for pid in process_ids():
        if pid == os.getpid():
            continue
        inode = network_of(pid)
        if inode is not None and inode in wanted and start_ticks(pid) is not None:
            found[pid] = inode
    return found


def send_signal(pid: int, number: int) -> bool:
    """Whether the process was still there to take the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
