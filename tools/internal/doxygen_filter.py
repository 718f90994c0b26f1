"""Doxygen's view of a header: plain `//` comments become documentation, and their text means what it says.

    doxygen_filter.py FILE

Indented lines of a comment are code, as in the house's headers; everything that Doxygen would take for a command or a
tag is escaped.
"""

import re
import sys

_COMMENT = re.compile(r"^(\s*)// ?(.*)$")
_TRAILING = re.compile(r"^(.*\S)\s+// (.*)$")


def escape(text):
    text = re.sub(r"`([^`]*)`", r"\1", text)
    return re.sub(r"([\\@<>&#%$\"~|]|::)", r"\\\1", text)


def block(indent, lines):
    """A comment of its own."""
    out, code = [], False
    for line in lines:
        is_code = line.startswith("  ") or (code and not line.strip())
        if is_code and not code:
            out.append("@code{.cpp}")
        elif code and not is_code:
            out.append("@endcode")
        code = is_code
        out.append(line if code else escape(line))
    if code:
        out.append("@endcode")
    return ["%s/// %s" % (indent, line) for line in out]


# Doxygen 1.9 fails on specializations of std's templates by their qualified names.
_SPECIALIZATION = re.compile(r"^template <[^;{]*>\nstruct std::[^;{]*(;|\{.*?^\};)", re.MULTILINE | re.DOTALL)


def convert(text):
    text = _SPECIALIZATION.sub(lambda found: "\n" * found.group(0).count("\n"), text)
    result, pending, indent = [], [], ""
    for line in text.split("\n"):
        comment = _COMMENT.match(line)
        if comment and not (pending and comment.group(1) != indent):
            indent = comment.group(1)
            pending.append(comment.group(2))
            continue
        if pending:
            # A comment before a blank line or a brace is about what follows it at large, not about one declaration.
            about_one = line.strip() and not re.match(r"\s*(}|#|namespace\b|public:|private:)", line)
            result += block(indent, pending) if about_one else ["%s// %s" % (indent, p) for p in pending]
            pending = []
        if comment:
            indent = comment.group(1)
            pending.append(comment.group(2))
            continue
        trailing = _TRAILING.match(line)
        if trailing and '"' not in trailing.group(2) and trailing.group(1).rstrip().endswith((";", ",")):
            line = "%s  ///< %s" % (trailing.group(1), escape(trailing.group(2)))
        result.append(line)
    return "\n".join(result)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as f:
        print(convert(f.read()))
