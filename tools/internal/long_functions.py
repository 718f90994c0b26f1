#!/usr/bin/env python3
"""Lists the functions of more than 80 lines, longest first: tools/internal/long_functions.py [FOLDER].

By indentation, as clang-format leaves it; code of tests, benchmarks and examples is left out.
"""

import os
import re
import sys

LIMIT = 80
_OURS = ("base", "rpc", "coordinator", "agent", "worker", "client", "muster")
_STATEMENT = re.compile(r"(if|for|while|switch|else|do|try|case|return)\b")


def _indent(line):
    return len(line) - len(line.lstrip())


def functions(text):
    """(head, first line, number of lines) of each function that is not inside of another one."""
    lines = text.split("\n")
    open_blocks = []  # (indent, first line, head, is a function)
    for number, line in enumerate(lines):
        if line.lstrip().startswith("}"):
            while open_blocks and open_blocks[-1][0] >= _indent(line):
                indent, first, head, is_function = open_blocks.pop()
                if indent == _indent(line):
                    if is_function:
                        yield head, first + 1, number - first + 1
                    break
        if not re.search(r"\{(\s*//.*)?$", line) or line.lstrip().startswith(("//", "}")):
            continue
        first, head = number, line.strip()
        while first > 0 and not re.search(r"[;{}]$|^\s*$|^\s*//|^\s*#|\b(public|private|protected):$", lines[first - 1]):
            first -= 1
            head = lines[first].strip() + " " + head
        is_function = ("(" in head and not _STATEMENT.match(head) and not re.search(r"=\s*\{$", head)
                       and not re.match(r"(inline )?namespace|extern|(template *<.*?> *)?(class|struct|enum|union)\b", head)
                       and not any(block[3] for block in open_blocks))
        open_blocks.append((_indent(lines[first]), first, head, is_function))


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    found = []
    for top in _OURS:
        for folder, _, names in os.walk(os.path.join(root, top)):
            for name in sorted(names):
                if not re.search(r"\.(cc|h)$", name) or re.search(r"_test\.cc$|^fake_|^test_", name):
                    continue
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as f:
                    found += [(size, os.path.relpath(path, root), line, head) for head, line, size in functions(f.read())
                              if size > LIMIT and not head.endswith(") {}") and ") : " not in head]
    for size, path, line, head in sorted(found, reverse=True):
        print("%4d  %s:%d  %s" % (size, path, line, head[:100]))
    print("%d functions of more than %d lines" % (len(found), LIMIT))


if __name__ == "__main__":
    main()
