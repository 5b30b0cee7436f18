"""Planning: pure functions of values. No sockets, clocks, randomness or logging; equal inputs, equal plan."""
