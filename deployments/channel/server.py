"""The scheduler's end of the channel: listens, tells all clients the directory, carries replies.

A connection is a `session.Session`; requests go to the `Backend`. Replies come from any thread, and
one wake-up of the loop carries all that came since the last.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final

from coissue.deployments.channel.backend import Answer, Backend
from coissue.deployments.channel.frames import ChannelLimits, Directory, Endpoint, TenantInfo
from coissue.deployments.channel.session import Session
from coissue.deployments.channel.wire import Wire

#: sockaddr_un has room for so many bytes of path.
_PATH_BYTES: Final = 107


class ChannelServer:
    """Serves one endpoint. Made and used on the loop; `queue_reply` and `push_directory` may be
    called from any thread."""

    def __init__(
        self, endpoint: Endpoint, backend: Backend, limits: ChannelLimits | None = None
    ) -> None:
        if not endpoint.path and not endpoint.secret:
            raise ValueError("a TCP channel without a secret is refused")
        self.endpoint = endpoint
        self.backend = backend
        self.limits = limits or ChannelLimits()
        #: Tenants by name, as last pushed to the clients.
        self.tenants: dict[str, TenantInfo] = {}
        #: Connections, in order of arrival (a dict as an ordered set).
        self.sessions: dict[Session, None] = {}
        self._handle = 0
        #: Replies of other threads, carried over by one wake-up per burst.
        self._replies: deque[tuple[Session, int, Answer]] = deque()
        self._is_woken = False
        #: From `start` on; the thread is 0 before.
        self._loop: asyncio.AbstractEventLoop
        self._loop_thread = 0

    async def start(self) -> Endpoint:
        """Listens; returns the endpoint for clients, with the port that was chosen."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._refresh()
        make = partial(_connect, self)
        if self.endpoint.path:
            listener = listen_unix(self.endpoint.path)
            self._inode = os.stat(self.endpoint.path).st_ino
            self._server = await self._loop.create_unix_server(make, sock=listener)
            return self.endpoint
        listener = socket.create_server((self.endpoint.host, self.endpoint.port))
        port = listener.getsockname()[1]
        self._server = await self._loop.create_server(make, sock=listener)
        self.endpoint = Endpoint("", self.endpoint.host, port, self.endpoint.secret)
        return self.endpoint

    async def stop(self) -> None:
        self._server.close()
        for session in list(self.sessions):
            session.close("the scheduler stops")
        while self.sessions:  # a peer that does not read is cut off by `Link.close`
            await asyncio.sleep(0.01)
        path = self.endpoint.path
        if path and os.path.exists(path) and os.stat(path).st_ino == self._inode:
            os.unlink(path)

    def push_directory(self) -> None:
        """Tells all clients what `Backend.directory` says now; nothing before `start`."""
        if threading.get_ident() == self._loop_thread:
            self._refresh()
        elif self._loop_thread and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._refresh)

    def next_handle(self) -> int:
        self._handle += 1
        return self._handle

    def queue_reply(self, session: Session, number: int, answer: Answer) -> None:
        self._replies.append((session, number, answer))
        if not self._is_woken:
            self._is_woken = True
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._carry_replies)
                return
            try:
                self._loop.call_soon_threadsafe(self._carry_replies)
            except RuntimeError:  # the loop is closed: nobody is left to answer
                self._replies.clear()

    def _carry_replies(self) -> None:
        # First the flag: a reply queued from here on wakes the loop again.
        self._is_woken = False
        touched: dict[Session, None] = {}
        while self._replies:
            session, number, answer = self._replies.popleft()
            session.answer(number, answer)
            touched[session] = None
        for session in touched:
            session.flush()

    def _refresh(self) -> None:
        self.tenants = {info.name: info for info in self.backend.directory()}
        message = Directory(tuple(self.tenants.values()))
        for session in list(self.sessions):
            session.push(message)


def _connect(server: ChannelServer) -> Wire:
    return Wire(Session(server))


def listen_unix(path: str) -> socket.socket:
    """A listening socket that only this user can reach; replaces the file of a dead server."""
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise ValueError(
            f"socket path has {len(os.fsencode(path))} bytes, allowed: {_PATH_BYTES}: {path}"
        )
    folder = Path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"socket folder {folder} must belong to this user alone (mode 0700)")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{path} is there and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise FileExistsError(f"another scheduler listens on {path}")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(1024)
    listener.setblocking(False)
    return listener
