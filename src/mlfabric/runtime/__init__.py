"""The runtime: the only place with sockets and threads. Carries the roles' decisions out between hosts."""
