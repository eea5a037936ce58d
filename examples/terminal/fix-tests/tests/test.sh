#!/bin/bash
# The suite as it was, whatever has become of it, and one that nobody has seen.
mkdir -p /logs/verifier
if python3 -I /tests/shown.py && python3 -I /tests/hidden.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
