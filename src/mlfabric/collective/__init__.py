"""Collective operations between the members of a group: pure, without sockets, clocks or threads.

`routes` says which way every piece of an operation goes, `exchange` keeps count of the chunks of one
operation at one rank, `group` keeps operations in step, `switchboard` holds all of a node's groups and
speaks frames.
"""
