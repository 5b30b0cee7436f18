"""The simulator: the same roles as between real hosts, over flows and in virtual time."""
