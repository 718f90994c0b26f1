"""Prints the headers that a program which includes muster/*.h needs, relative to the repository's root, one a line.

Public ones are those directly in muster/; the others are what they include, over any number of steps. Fails if
that reaches generated code, which is not part of the installed interface.
"""

import os
import re
import sys

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def closure(root):
    todo = sorted("muster/" + f for f in os.listdir(os.path.join(root, "muster"))
                  if f.endswith(".h") and not f.startswith(("fake_", "test_")))
    seen = set(todo)
    while todo:
        path = todo.pop()
        with open(os.path.join(root, path), encoding="utf-8") as f:
            names = _INCLUDE.findall(f.read())
        for name in names:
            if name in seen or name.startswith(("absl/", "torch/", "ATen/", "c10/")):
                continue
            if not os.path.isfile(os.path.join(root, name)):
                sys.exit("%s includes %s, which is not in the source tree: public headers cannot need it" % (path, name))
            seen.add(name)
            todo.append(name)
    return sorted(seen)


if __name__ == "__main__":
    print("\n".join(closure(sys.argv[1])))
