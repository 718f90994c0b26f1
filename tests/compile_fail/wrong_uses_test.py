"""Compiles wrong_uses.cc. Of each use, the first line with "error:" must hold the text that the use names.

Runs in the runfiles, which hold the headers of //muster. All uses are one compilation, in a namespace each with types of
its own, so that no template is instantiated for two of them.
"""

import os
import re
import subprocess
import unittest

_HERE = os.path.dirname(os.path.abspath(__file__))
_NAME = "tests/compile_fail/wrong_uses.cc"


def _flags():
    """As Bazel compiles the examples, less what generates code."""
    with open(os.path.join(_HERE, "muster_macros.txt"), encoding="utf-8") as f:
        macros = ["-D" + macro for macro in f.read().splitlines()]
    torch = "include/torch/csrc/api/include/torch/torch.h"
    api = os.path.dirname(os.path.dirname(os.path.realpath(os.path.join("..", "libtorch", torch))))
    root = api[:-len("/torch/csrc/api/include")]
    return ["-std=c++20", *macros, "-I.", "-isystem", root, "-isystem", api]


def _split(text):
    """The common part, and [(name, expected error or None, line number, code)]."""
    head, *uses = re.split(r"^// Use: ", text, flags=re.MULTILINE)
    line = head.count("\n") + 1
    cases = []
    for use in uses:
        name, code = use.split("\n", 1)
        error = re.match(r"// Error: (.*)\n", code)
        cases.append((name, error.group(1) if error else None, line + 1, code))
        line += use.count("\n")
    return head, cases


def _program(head, cases):
    includes, types = head.rsplit("#include", 1)
    include, types = types.split("\n", 1)
    parts = [includes, "#include", include, "\n"]
    for number, (_, _, line, code) in enumerate(cases):
        parts.append('#line 1 "types"\nnamespace use_%d {\n%s\n#line %d "%s"\n%s\n}\n' % (number, types, line, _NAME, code))
    return "".join(parts)


def _first_errors(output, cases):
    """The first line with "error:" of each use. An error belongs to the line that it is in or is required from: in a
    header, to the line that the compiler has named last."""
    first = [""] * len(cases)
    current = None
    for text in output.splitlines():
        place = re.search(re.escape(_NAME) + r":(\d+):", text)
        if place:
            number = sum(1 for case in cases if case[2] <= int(place.group(1))) - 1
            current = number if number >= 0 else current
        if "error:" in text and current is not None and not first[current]:
            first[current] = text
    return first


class WrongUses(unittest.TestCase):
    def test_first_error_names_the_mistake_and_the_way_out(self):
        with open(os.path.join(_HERE, "wrong_uses.cc"), encoding="utf-8") as f:
            head, cases = _split(f.read())
        self.assertGreaterEqual(sum(1 for case in cases if case[1]), 20)
        # A result that must not be ignored is a warning by default.
        command = ["g++", *_flags(), "-Werror=unused-result", "-fsyntax-only", "-ftemplate-backtrace-limit=0", "-fmax-errors=0", "-x", "c++", "-"]
        run = subprocess.run(command, input=_program(head, cases), capture_output=True, text=True, check=False,
                             env=dict(os.environ, LC_ALL="C"))
        errors = _first_errors(run.stderr, cases)
        for (name, expected, _, _), error in zip(cases, errors):
            with self.subTest(name):
                if expected is None:
                    self.assertEqual(error, "")
                else:
                    self.assertIn(expected, error)


if __name__ == "__main__":
    unittest.main()
