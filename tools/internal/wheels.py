"""Downloads the wheels of third_party/wheels.lock and unpacks the parts that Muster uses.

    wheels.py LOCK ROOT cpu|cuda

Every file is written next to its final name and renamed to it, and a wheel's stamp (ROOT/.stamps/NAME-VERSION) is
written last: an interrupted run is finished by the next one, a finished one is recognised without looking into
the wheels, and programs that use ROOT meanwhile see either the old or the new file. Nothing is deleted.
"""

import os
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib

# The wheels are made for CPython 3.11 whatever Python runs this: they are unpacked, not imported.
_PIP = [
    sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
    "--no-cache-dir", "--no-deps", "--require-hashes", "--only-binary=:all:", "--python-version=3.11",
    "--implementation=cp", "--abi=cp311", "--abi=none",
] + ["--platform=manylinux_2_%d_x86_64" % minor for minor in (28, 27, 25, 18, 17)] + [
    "--platform=manylinux2014_x86_64", "--platform=manylinux2010_x86_64", "--platform=manylinux1_x86_64",
]


class Wheel:
    def __init__(self, requirement, paths):
        self.requirement = requirement
        self.paths = paths
        self.name = re.match(r"([A-Za-z0-9_.-]+)==([^ ]+)", requirement)
        if not self.name or "--hash=sha256:" not in requirement:
            raise SystemExit("wheels.lock: not 'NAME==VERSION --hash=sha256:...': " + requirement)
        self.name = "-".join(self.name.groups())

    def stamp(self):
        return self.requirement + "\n" + "\n".join(sorted(self.paths)) + "\n"


def read_lock(path, mode):
    """The wheels of the lock that a machine of this mode needs, in order."""
    wheels, spec = [], None
    for line in open(path, encoding="utf-8"):
        line = line.strip()
        if line.startswith("#:"):
            spec = dict(field.split("=", 1) for field in line[2:].split())
        elif line and not line.startswith("#"):
            if spec is None:
                raise SystemExit("wheels.lock: no '#:' line above " + line)
            if mode in spec:
                wheels.append(Wheel(line, spec[mode].split(",")))
            spec = None
    return wheels


def is_done(wheel, root):
    try:
        with open(os.path.join(root, ".stamps", wheel.name), encoding="utf-8") as f:
            done = f.read().splitlines()
    except OSError:
        return False
    return bool(done) and done[0] == wheel.requirement and set(wheel.paths) <= set(done[1:])


def same_content(path, info):
    try:
        if os.path.getsize(path) != info.file_size:
            return False
        crc = 0
        with open(path, "rb") as f:
            while chunk := f.read(1 << 20):
                crc = zlib.crc32(chunk, crc)
        return crc == info.CRC
    except OSError:
        return False


def unpack(archive, wheel, root):
    """Lays out the wanted files of `archive` under `root`; files that are there already are left alone."""
    made = set()
    with zipfile.ZipFile(archive) as z:
        for info in z.infolist():
            if info.is_dir() or not any(info.filename.startswith(p + "/") for p in wheel.paths):
                continue
            target = os.path.join(root, info.filename)
            if same_content(target, info):
                continue
            folder = os.path.dirname(target)
            if folder not in made:
                os.makedirs(folder, exist_ok=True)
                made.add(folder)
            staged = "%s.new%d" % (target, os.getpid())
            try:
                with z.open(info) as source, open(staged, "wb") as out:
                    while chunk := source.read(1 << 20):
                        out.write(chunk)
                os.chmod(staged, 0o755 if (info.external_attr >> 16) & stat.S_IXUSR else 0o644)
                os.replace(staged, target)
            finally:
                if os.path.exists(staged):
                    os.unlink(staged)
    stamp = os.path.join(root, ".stamps", wheel.name)
    os.makedirs(os.path.dirname(stamp), exist_ok=True)
    with open(stamp + ".new", "w", encoding="utf-8") as f:
        f.write(wheel.stamp())
    os.replace(stamp + ".new", stamp)


def main():
    lock, root, mode = sys.argv[1:]
    missing = [w for w in read_lock(lock, mode) if not is_done(w, root)]
    for i, wheel in enumerate(missing):
        print("setup: wheel %d/%d %s" % (i + 1, len(missing), wheel.name), flush=True)
        os.makedirs(root, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as scratch:
            requirements = os.path.join(scratch, "requirements.txt")
            with open(requirements, "w", encoding="utf-8") as f:
                f.write(wheel.requirement + "\n")
            if subprocess.run(_PIP + ["-r", requirements, "-d", scratch]).returncode != 0:
                raise SystemExit("setup: could not download %s (see above); run tools/setup again" % wheel.name)
            archives = [f for f in os.listdir(scratch) if f.endswith(".whl")]
            if len(archives) != 1:
                raise SystemExit("setup: expected one wheel for %s, got %s" % (wheel.name, archives))
            unpack(os.path.join(scratch, archives[0]), wheel, root)


if __name__ == "__main__":
    main()
