"""A program that knows nothing of Muster, for foreign_test: plain Python, without PyTorch.

usage: python_program.py FOLDER

Every rank prints its place and stands in stand_still() until there is a file "go" in FOLDER. In the
first attempt rank 1 then kills itself; in the next one all ranks end well.
"""

import os
import signal
import sys
import time


def stand_still(folder):
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.05)


def main():
    folder = sys.argv[1]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_MAX_RESTARTS")
    places = " ".join(os.environ[name] for name in names + ("ACCELERATE_USE_CPU",))
    print(f"rank {rank} of {size}, attempt {attempt}, {places}", flush=True)
    stand_still(folder)
    if attempt == 0 and rank == 1:
        print("rank 1 ends here", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        time.sleep(3600)
    print(f"rank {rank} is done", flush=True)


main()
