"""Decides which event loop streams run on: uvloop's where it is installed, which costs a token about half."""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop's where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
