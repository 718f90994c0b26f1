"""Threads that stand at known places. Prints "ready" when all of them do.

Run it under the name that the cases expect:
python3 -c 'import sys; exec(compile(open(sys.argv[1]).read(), "/srv/program.py", "exec"))' program.py
"""

import _thread
import time

held = _thread.allocate_lock()
held.acquire()
count = 0


def stand():
    global count
    count += 1
    held.acquire()


class Träger:
    def schritt(self):
        stand()


def γράμμα(depth):
    if depth == 0:
        Träger().schritt()
    else:
        γράμμα(depth - 1)


def recurse(depth):
    if depth == 0:
        stand()
    return recurse(depth - 1) + 1


def generate():
    yield 1
    stand()


def consume():
    for _ in generate():
        pass


async def inner():
    stand()


async def outer():
    await inner()


def run_coroutine():
    outer().send(None)


def through_c():
    sorted([2, 1], key=lambda _: stand())


def 𐐀_long_lines(a,
                  b):
    return [
        a,
        b,
        stand(),
        1,
    ]


def after_a_long_gap():
    x = 1






























































































































































    # Beyond what one step of a table of lines can say.
    stand()
    return x


places = {}
exec(compile("def 𐐀():\n\n\n  stand()\n", "/srv/𝒳/in\nhere.py", "exec"), globals(), places)
starts = [
    lambda: γράμμα(2),
    lambda: recurse(80),
    consume,
    run_coroutine,
    through_c,
    lambda: 𐐀_long_lines(1, 2),
    after_a_long_gap,
    places["𐐀"],
]
for start in starts:
    _thread.start_new_thread(start, ())
while count < len(starts):
    time.sleep(0.01)
time.sleep(0.2)
print("ready", flush=True)
time.sleep(3600)
