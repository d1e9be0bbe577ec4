"""Where every block is: block ids, the states of their copies, leases, moves under way.

Door: `copies.Residency`. States change only through `blocks`' transition table.
"""
