"""Breaks comment lines of C++ files that are longer than 100 columns; clang-format leaves comments to their authors.

    wrap_comments.py FILE...

From the first line that is too long, the rest of its paragraph is filled again. Everything else stays as it is: other
paragraphs, lists, indented lines (code), and comments behind code.
"""

import re
import sys

_LIMIT = 100
_LINE = re.compile(r"^(\s*)// ( *)((?:[-*]|\d+\.) )?(\S.*)$")


def wrap(text):
    lines = text.split("\n")
    result = []
    i = 0
    while i < len(lines):
        match = _LINE.match(lines[i])
        if len(lines[i]) <= _LIMIT or not match:
            result.append(lines[i])
            i += 1
            continue
        indent, inner, marker, body = match.groups()
        first = "%s// %s%s" % (indent, inner, marker or "")
        # A later line of a list's entry is indented already; only its own marker makes it hang.
        rest = "%s// %s%s" % (indent, inner, " " * len(marker or ""))
        words = body.split()
        i += 1
        while i < len(lines):
            follow = _LINE.match(lines[i])
            if not follow or follow.group(3) or "%s// %s" % (follow.group(1), follow.group(2)) != rest:
                break
            words += follow.group(4).split()
            i += 1
        line = first + words[0]
        for word in words[1:]:
            if len(line) + 1 + len(word) > _LIMIT:
                result.append(line)
                line = rest + word
            else:
                line += " " + word
        result.append(line)
    return "\n".join(result)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as f:
            before = f.read()
        after = wrap(before)
        if after != before:
            with open(path, "w", encoding="utf-8") as f:
                f.write(after)
