"""The copies of every block: block ids, the states of copies, leases, moves in flight.

Door: `copies.Residency`. States change only through `blocks`' transition table.
"""
