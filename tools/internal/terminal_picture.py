#!/usr/bin/env python3
"""usage: tools/internal/terminal_picture.py OUT.svg [--columns N] COMMAND...

Runs each COMMAND in bash on a terminal of its own and draws what a person sees, prompts and colours included, as an SVG.
A COMMAND that begins with '@' is run and not shown. It draws docs/pictures/jobs.svg.
"""
import argparse
import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import termios

COLOURS = {2: "#7d8590", 31: "#ff7b72", 32: "#3fb950", 33: "#d29922", 34: "#58a6ff", 35: "#bc8cff", 36: "#39c5cf",
           90: "#7d8590", 91: "#ff7b72", 92: "#3fb950", 93: "#d29922", 94: "#58a6ff", 95: "#bc8cff", 96: "#39c5cf"}
LINE, CHARACTER, MARGIN = 17, 7.83, 14


def run(command, columns):
    """What `command` writes to a terminal that is `columns` wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(["bash", "-c", command], stdin=slave, stdout=slave, stderr=slave, env=environment,
                               start_new_session=True)
    os.close(slave)
    output = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        output += piece
    os.close(master)
    process.wait()
    return output.decode("utf-8", "replace").replace("\r\n", "\n")


def spans(text):
    """(colour, bold, text) of each piece of a line."""
    colour, bold = None, False
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z])", text):
        code = re.fullmatch(r"\x1b\[([0-9;]*)m", part)
        if code:
            for number in [int(n or 0) for n in code.group(1).split(";")]:
                if number == 0:
                    colour, bold = None, False
                elif number == 1:
                    bold = True
                elif number in COLOURS:
                    colour = COLOURS[number]
        elif part and not part.startswith("\x1b"):
            yield colour, bold, part


def screens(text):
    """The last picture of output that clears the screen, or all of it."""
    return re.split(r"\x1b\[2J|\x1b\[H|\x1bc", text)[-1]


def draw(lines, columns):
    width, height = columns * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
           f'viewBox="0 0 {width:.0f} {height}">',
           f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>',
           '<g font-family="ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace" font-size="13" '
           'fill="#e6edf3" xml:space="preserve">']
    for row, line in enumerate(lines):
        y = MARGIN + row * LINE + 13
        column = 0
        for colour, bold, text in spans(line):
            style = (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if bold else "")
            length = len(text)
            if text.strip():
                # The given length keeps columns aligned whatever font the reader has.
                out.append(f'<text x="{MARGIN + column * CHARACTER:.1f}" y="{y}" '
                           f'textLength="{length * CHARACTER:.1f}"{style}>{html.escape(text)}</text>')
            column += length
    out.append("</g></svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--columns", type=int, default=112)
    parser.add_argument("commands", nargs="+")
    arguments = parser.parse_args()
    lines = []
    for command in arguments.commands:
        shown = not command.startswith("@")
        output = run(command.lstrip("@"), arguments.columns)
        if not shown:
            continue
        if lines:
            lines.append("")
        lines.append(f"\x1b[32m$\x1b[0m \x1b[1m{command}\x1b[0m")
        for line in screens(output).rstrip("\n").split("\n"):
            line = line.split("\r")[-1].expandtabs()
            while len(line) > arguments.columns and "\x1b" not in line:
                lines.append(line[: arguments.columns])
                line = line[arguments.columns:]
            lines.append(line)
    with open(arguments.out, "w", encoding="utf-8") as out:
        out.write(draw(lines, arguments.columns))


if __name__ == "__main__":
    sys.exit(main())
