"""The wire: what a record is, how it becomes bytes, and the words for what can happen to it. No I/O."""
