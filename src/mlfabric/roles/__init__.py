"""The five roles as pure state machines: `handle(event, now) -> list[Action]`.

No sockets, threads, clocks, randomness or logging. Two drivers run the same roles: the runtime between real
hosts and the simulator in virtual time.
"""
