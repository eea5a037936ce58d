"""Data planes that bring the same episodes from producers to a batch, each in a file of its own.

A plane's file holds its processes, which run in the plane's own environment (`-m benchmarks.planes.NAME ROLE ...`), and
what starts and measures them, which runs in ours. So a file imports only numpy and the standard library at its top.
"""
