#!/bin/bash
mkdir -p /logs/verifier
python3 -I /tests/check.py
