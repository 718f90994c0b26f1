#!/usr/bin/env bash
exec python3 -B "$(dirname "$(readlink -f "$0")")/style_test.py"
