"""Extracts the C++ of pages, for snippets_test.cc to include.

usage: extract.py PAGE.md... snippets_test.cc OUTPUT...

A block of PAGE.md fenced as cpp or c++ becomes PAGE_N.inc, counted from 1; includes.inc holds the includes of public headers
of all pages. A fenced diff counts too: it gives what is there after the edit. `...` stands for code that is left out.
"""

import os
import re
import sys

BLOCK = re.compile(r"^```(cpp|c\+\+|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(kind, text):
    """What the compiler gets of a block: line by line, so that its errors name lines of the page."""
    lines = text.splitlines()
    if kind == "diff":
        lines = ["" if line.startswith("-") else line[1:] for line in lines]
    lines = ["" if line.startswith("#include ") or line.strip() == "..." else line for line in lines]
    return [line.replace("...;", ";") for line in lines]


def snippets_of(page):
    """The files that a page gives, by name, and the public headers that it includes."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    stem, files = os.path.basename(page)[: -len(".md")], {}
    for number, block in enumerate(BLOCK.finditer(text), 1):
        first = text.count("\n", 0, block.start()) + 2
        line = '#line %d "%s"' % (first, page)
        files["%s_%d.inc" % (stem, number)] = [line] + code_of(block.group(1), block.group(2))
    return files, re.findall(r'^#include "muster/.*$', text, re.MULTILINE)


def main(arguments):
    outputs = {os.path.basename(path): path for path in arguments if path.endswith(".inc")}
    files, includes = {}, set()
    for page in arguments:
        if page.endswith(".md"):
            more, headers = snippets_of(page)
            files.update(more)
            includes.update(headers)
    files["includes.inc"] = sorted(includes)
    if set(files) - set(outputs):
        sys.exit("nothing compiles %s: add it to tests/docs" % ", ".join(sorted(set(files) - set(outputs))))
    if set(outputs) - set(files):
        sys.exit("no page has %s: remove it from tests/docs" % ", ".join(sorted(set(outputs) - set(files))))
    for source in arguments:
        if source.endswith(".cc"):
            with open(source, encoding="utf-8") as file:
                included = set(re.findall(r'^#include "tests/docs/(.*)"$', file.read(), re.MULTILINE))
            if set(files) - included:
                sys.exit("%s does not include %s" % (source, ", ".join(sorted(set(files) - included))))
    for name, path in outputs.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(files[name]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
