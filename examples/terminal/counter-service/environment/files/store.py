"""Counters in memory."""

COUNTERS = {}


def add(name):
    COUNTERS[name] = COUNTERS.get(name, 0) + 1
    return COUNTERS[name]


def value(name):
    return COUNTERS.get(name, 0)
