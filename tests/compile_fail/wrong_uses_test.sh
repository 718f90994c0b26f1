#!/usr/bin/env bash
exec python3 -B tests/compile_fail/wrong_uses_test.py
