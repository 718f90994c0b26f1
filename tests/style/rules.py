"""The house rules that a compiler does not check. docs/architecture.md: which folder may include which;
CONTRIBUTING.md: the rest.

Each rule is a function (path, text) -> [(line number, message)] over one C++ file, or takes the whole tree.
"""

import os
import re

# --- Which folder may include which -------------------------------------------------------------------------------------

# The library that an #include names, by its beginning. The first match counts; our own folders name themselves.
_THIRD_PARTY = [
    ("torch", r"(torch|ATen|c10|caffe2)/"),
    ("gloo", r"gloo/"),
    ("nccl", r"(nccl|cuda|cublas|cusparse|cusolver)[\w.]*\.h"),
    ("grpc", r"(grpcpp|grpc)/"),
    ("protobuf", r"google/protobuf/"),
    ("absl", r"absl/"),
    ("json", r"nlohmann/"),
    ("yaml", r"yaml-cpp/"),
    ("cli11", r"CLI/"),
    ("httplib", r"httplib\.h"),
    ("sqlite", r"sqlite3\.h"),
    ("icu", r"unicode/"),
    ("pcre2", r"pcre2\.h"),
    ("openssl", r"openssl/"),
    ("hash", r"(xxhash|zstd|zlib)\.h"),
    ("elfutils", r"elfutils/"),
    ("test", r"(gtest|gmock|benchmark)/"),
]
# Folders that have rules apart from those of the folder that they are in.
_WORKER_ROOMS = ("nested", "collective", "job", "data", "parallel", "track", "checkpoint", "text", "train", "bigmodel", "models")
_ROOMS = ("base/flags", "rpc/session", "coordinator/journal") + tuple("worker/" + room for room in _WORKER_ROOMS)
_FOLDERS = ("base", "proto", "rpc", "coordinator", "agent", "worker", "client", "muster", "examples", "tests", "bench")

# What the files below a folder may include; the longest matching folder counts. "stubs" are *.grpc.pb.h, "proto" the
# messages. Anything that is neither ours nor listed above (the standard library, the system) is free.
_FILES = {"absl", "json", "yaml", "hash"}
_TENSORS = _FILES | {"base", "torch"}
_ALLOWED = {
    "base": _FILES | {"openssl", "base"},
    "base/flags": {"absl", "json", "cli11", "base", "base/flags"},
    "rpc": {"absl", "base", "proto", "stubs", "protobuf", "grpc", "openssl", "rpc", "rpc/session"},
    "rpc/session": {"absl", "base", "proto", "protobuf", "rpc/session"},
    # The cores are pure: only the journal sees the database, only what wires the server sees the journal.
    "coordinator": _FILES | {"base", "proto", "protobuf", "rpc/session", "coordinator"},
    "coordinator/journal": _FILES | {"base", "proto", "protobuf", "sqlite", "coordinator", "coordinator/journal"},
    "coordinator/service": _FILES
    | {"base", "proto", "stubs", "protobuf", "grpc", "rpc", "rpc/session", "coordinator", "coordinator/journal"},
    "coordinator/web": _FILES | {"base", "proto", "protobuf", "grpc", "httplib", "openssl", "rpc", "coordinator"},
    "coordinator/cmd": {"absl", "base", "base/flags", "proto", "protobuf", "cli11", "rpc", "coordinator", "coordinator/journal"},
    "agent": _FILES | {"base", "base/flags", "proto", "stubs", "protobuf", "grpc", "rpc", "rpc/session", "cli11", "elfutils", "agent"},
    # The order of the rooms: a room sees those before it. Tests may look ahead.
    "worker/nested": _TENSORS | {"worker/nested"},
    "worker/collective": _TENSORS | {"gloo", "nccl", "worker/nested", "worker/collective"},
    "worker/checkpoint": _TENSORS | {"worker/nested", "worker/collective", "worker/checkpoint"},
    "worker/job": _TENSORS
    | {"proto", "stubs", "protobuf", "grpc", "rpc", "rpc/session", "gloo"}
    | {"worker/nested", "worker/collective", "worker/checkpoint", "worker/job"},
    "worker/data": _TENSORS | {"worker/nested", "worker/collective", "worker/data"},
    "worker/parallel": _TENSORS | {"worker/nested", "worker/collective", "worker/parallel"},
    # No torch, and no other room: text is bytes.
    "worker/text": {"absl", "json", "icu", "pcre2", "base", "worker/text"},
    "worker/track": _TENSORS | {"worker/nested", "worker/collective", "worker/track"},
    "worker/train": _TENSORS
    | {"worker/nested", "worker/collective", "worker/parallel", "worker/checkpoint", "worker/train"},
    # Big models: from files to the devices that there are; what pages weights is parallel's.
    "worker/bigmodel": _TENSORS
    | {"worker/nested", "worker/collective", "worker/checkpoint", "worker/parallel", "worker/train", "worker/bigmodel"},
    # Models see what trains them, and nothing in Muster sees them except what users include.
    "worker/models": _TENSORS
    | {"worker/nested", "worker/collective", "worker/checkpoint", "worker/text", "worker/train", "worker/models"},
    "client": _FILES | {"base", "proto", "stubs", "protobuf", "grpc", "rpc", "rpc/session", "cli11", "httplib", "client"},
    # Tools on files; Bazel's visibility lets them see only those libraries of the room that have no torch.
    "client/checkpoints": {"absl", "json", "base", "client", "worker/checkpoint", "worker/bigmodel", "worker/models"},
    "muster": _FILES | {"base", "torch", "client", "muster"} | {"worker/" + room for room in _WORKER_ROOMS},
    # The program behind `muster generate`.
    "muster/generate": {"absl", "base", "cli11", "json", "torch", "muster", "worker/bigmodel", "worker/checkpoint", "worker/models", "worker/text"},
    "examples": {"absl", "cli11", "torch", "muster", "examples"},
}

# Files that wire parts together may name what their folder may not, with the reason.
_EXCEPTIONS = {
    # `muster launch` embeds a coordinator and an agent: these two files hand them to the commands as interfaces.
    "client/cli/main.cc": {"coordinator", "agent"},
    "client/cli/local_job.cc": {"agent"},
}

# Headers that users compile against: none of these may leak into them.
_NOT_IN_PUBLIC_HEADERS = {"grpc", "protobuf", "proto", "stubs", "json", "yaml", "httplib", "cli11", "sqlite", "icu", "pcre2", "nccl", "gloo", "elfutils"}

_INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def includes(text):
    """[(line number, quote, name)]"""
    return [(text.count("\n", 0, m.start()) + 1, m.group(1), m.group(2)) for m in _INCLUDE.finditer(text)]


def classify(name):
    """What an included name is: a folder of ours ("base", "worker/data"), a third party, or None (free)."""
    if name.endswith(".grpc.pb.h"):
        return "stubs"
    if name.startswith("proto/"):
        return "proto"
    folder = name.split("/")[0]
    if folder in _FOLDERS and "/" in name:
        return next((f for f in _ROOMS if name.startswith(f + "/")), folder)
    for label, pattern in _THIRD_PARTY:
        if re.match(pattern, name):
            return label
    return None


def _is_test_only(path):
    return bool(re.search(r"_test\.cc$|(^|/)(fake|test)_[^/]*$|_fake\.(h|cc)$", path))


def include_rules(path, text):
    folders = [f for f in _ALLOWED if path == f or path.startswith(f + "/")]
    if not folders:
        return []
    folder = max(folders, key=len)
    allowed = _ALLOWED[folder] | _EXCEPTIONS.get(path, set())
    if _is_test_only(path):
        allowed = allowed | {"test", "openssl", "tests/testdata/golden.h"}
        if folder.startswith("worker/"):
            allowed = allowed | {"worker/" + room for room in _WORKER_ROOMS}
    found = []
    for line, _, name in includes(text):
        kind = classify(name)
        if kind is None or kind in allowed or name in allowed:
            continue
        found.append((line, "%s may not include %s (%s)" % (folder, name, kind)))
    return found


def public_headers(path, text):
    if not re.fullmatch(r"muster/[^/]+\.h", path):
        return []
    return [(line, "a public header may not include " + name)
            for line, _, name in includes(text) if classify(name) in _NOT_IN_PUBLIC_HEADERS]


def torch_umbrella(path, text):
    """torch/torch.h costs 17-30 s a file: in headers only below muster/, where users want it anyway."""
    if not path.endswith(".h") or path.split("/")[0] in ("muster", "examples", "tests"):
        return []
    return [(line, "a header may not include torch/torch.h: name the ATen headers it needs")
            for line, _, name in includes(text) if name in ("torch/torch.h", "torch/all.h")]


def quotes(path, text):
    """Our own files in quotes, so that an installed header can never shadow them."""
    return [(line, 'write #include "%s"' % name) for line, quote, name in includes(text)
            if quote == "<" and name.split("/")[0] in _FOLDERS and "/" in name]


# --- Words that the house does not use ------------------------------------------------------------------------

def header_guard(path, text):
    if not path.endswith(".h"):
        return []
    name = re.sub(r"[/.]", "_", path).upper()
    wanted = {"MUSTER_%s_" % name, "%s_" % name} if path.startswith("muster/") else {"MUSTER_%s_" % name}
    match = re.search(r"^#ifndef (\S+)\n#define (\S+)$", text, re.MULTILINE)
    if not match or match.group(1) != match.group(2) or match.group(1) not in wanted:
        return [(1, "header guard must be #ifndef/#define " + max(wanted, key=len))]
    if "#endif  // %s\n" % match.group(1) not in text:
        return [(text.count("\n"), "end the guard with '#endif  // %s'" % match.group(1))]
    return []


def strip_code(text):
    """The text without comments and the insides of string literals, line for line."""
    def blank(match):
        found = match.group(0)
        if found.startswith('R"'):
            return '""' + "\n" * found.count("\n")
        if found[0] in "\"'":
            return found[0] * 2
        return "\n" * found.count("\n")
    return re.sub(r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*(?:.|\n)*?\*/',
                  blank, text)


# (pattern, what to do, files that may, whether tests may)
_WORDS = [
    # LibTorch's generators are guarded by a std::mutex of their own: `lock(generator.mutex())` is meant.
    (r"\bstd::(mutex|condition_variable|lock_guard|unique_lock|scoped_lock)\b(?!.*\bmutex\(\)\))",
     "use muster::Mutex of base/mutex.h", {"base/mutex.h"}, True),
    (r"\babsl::Mutex(Lock)?\b", "use muster::Mutex of base/mutex.h", set(), False),
    (r"\b(SleepFor|sleep_for|sleep_until|usleep|nanosleep)\s*\(|(?<![\w.>])sleep\s*\(",
     "no sleeps: wait on a condition, a notification or a deadline",
     # Between fork and exec, and in the process that outlives a killed agent, nothing can be waited on.
     {"agent/process.cc"}, False),
    (r"(?<![A-Za-z_])(D?V?LOG|D?CHECK)(_[A-Z]{2})?\s*\(", "write MUSTER_LOG or MUSTER_CHECK", set(), False),
    (r"\bGTEST_SKIP\b|\bDISABLED_\w+", "a test is run or deleted, never switched off", set(), False),
    (r"\bthread_?\w*\.detach\(\)|std::thread\([^;]*\)\.detach\(\)", "a thread has an owner and a join", set(), False),
    (r"\b(system|popen)\s*\(", "no shell: give an argv vector to the kernel", set(), True),
    (r"\busing namespace (?![\w:]*literals|\w+_internal\b)", "no using-directives", set(), False),
    (r"\bstd::(rand|async)\b|(?<![\w.:>])s?rand\s*\(\s*\)", "not std::async or rand()", set(), False),
]


def words(path, text):
    code = strip_code(text)
    is_test = _is_test_only(path) or path.startswith(("tests/", "bench/"))
    found = []
    for pattern, message, free, tests_may in _WORDS:
        if path in free or (tests_may and is_test):
            continue
        for match in re.finditer(pattern, code):
            found.append((code.count("\n", 0, match.start()) + 1, "%s: %s" % (match.group(0).strip(), message)))
    return found


# CONTRIBUTING, rule 9: a comment is a sentence or a noun phrase of plain English. "Of ranks that died." is neither, and of
# "who", "it was told" and the like a reader has to guess the noun.
_FRAGMENT = re.compile(r"\s*// (Of(?! [^.;:]*, )|Those|Who|Whoever|Whom|Whose) [a-z]")
_GUESSED = re.compile(r"//.*?\b(anew|whoever|somebody|awhile|(?:is|are|was|were) told)\b")


def comments(path, text):
    found, before = [], ""
    for number, line in enumerate(text.split("\n"), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line):
            found.append((number, "a TODO names an issue: TODO(#12)"))
        if line != line.rstrip() or "\t" in line:
            found.append((number, "tab or space at the end of the line"))
        # The second line of a heading that was too long for one line is allowed.
        if re.match(r"\s*//\s*[-=*#/]{8,}\s*$", line) and not re.match(r"\s*// ---+ \w", before):
            found.append((number, "no banners"))
        if _FRAGMENT.match(line) and not re.match(r"\s*//", before):
            found.append((number, "a comment begins with its verb or noun: \"Removes the files of ranks that died\", not "
                          "\"Of ranks that died\""))
        word = _GUESSED.match(line) or _GUESSED.search(line) if path.endswith((".cc", ".h", ".proto")) else None
        if word:
            found.append((number, "%s: name who or what it is" % word.group(1)))
        before = line
    return found


def line_length(path, text):
    """clang-format breaks code; comments keep their lines, which tools/format breaks only beyond the limit."""
    return [(number, "%d columns, of 100 at most: run tools/format" % len(line))
            for number, line in enumerate(text.split("\n"), 1) if len(line) > 100]


_FAILPOINT = re.compile(r'\bMUSTER_FAILPOINT(_STATUS)?\("([^"]*)"\)')
_FAILPOINT_ROW = re.compile(r'^    \{"([^"]+)",\s+(true|false),', re.MULTILINE)


def failpoints(table, sources):
    """The table of failpoints (base/failpoint.cc) and their uses in the product, {path: text}: each name is used in one
    place, by the macro that fits its row."""
    rows = dict(_FAILPOINT_ROW.findall(table))
    places = {}
    for path, text in sorted(sources.items()):
        for match in _FAILPOINT.finditer(text):
            place = (path, text.count("\n", 0, match.start()) + 1)
            name, fails = match.group(2), "true" if match.group(1) else "false"
            if name not in rows:
                found = "the table in base/failpoint.cc lacks '%s'" % name
            elif name in places:
                found = "'%s' is also at %s:%d" % ((name,) + places[name])
            elif rows[name] != fails:
                found = "'%s' takes %s according to its row" % (name, "error" if fails == "false" else "no error")
            else:
                found = None
            places.setdefault(name, place)
            if found:
                yield place + (found,)
    for name in sorted(set(rows) - set(places)):
        yield ("base/failpoint.cc", 1, "'%s' is used nowhere" % name)


_PATH = re.compile(r"`((?:%s|docs|tools|third_party|cmake)/[\w./-]*[\w-])`" % "|".join(_FOLDERS))
_PLACE = re.compile(r"`([A-Za-z_][\w:]*)` in\s+`([\w./-]+/[\w.-]+\.\w+)`")


def named_paths(text, exists):
    """What a document names in backquotes that is not there: [(line, message)]. A path may leave out .h, .cc or .proto."""
    return [(text.count("\n", 0, m.start()) + 1, "no file " + m.group(1)) for m in _PATH.finditer(text)
            if not any(exists(m.group(1) + end) for end in ("", ".h", ".cc", ".proto"))]


def named_places(text, read):
    """`Name` in `file`, where the file does not have the name: [(line, message)]. `read` gives a file's text or None."""
    found = []
    for match in _PLACE.finditer(text):
        name, path = match.groups()
        content = read(path)
        if content is None or not re.search(r"(?<!\w)%s\b" % re.escape(name), content):
            found.append((text.count("\n", 0, match.start()) + 1, "no %s in %s" % (name, path)))
    return found


_BARE_FOLDER = re.compile(r'\b(mkdtemp|mkstemp|tmpnam|TempDir|temp_directory_path)\s*\(|"TEST_TMPDIR"')
# The helper itself; examples are programs of users, who do not have it.
_MAY_NAME_FOLDERS = {"base/test_folder.h", "examples/mnist/idx_test.cc"}


def temporary_folders(path, text):
    """Tests make their folders in one way: unique to the run, closed to others, and removed."""
    if not (_is_test_only(path) or path.startswith("tests/")) or path in _MAY_NAME_FOLDERS:
        return []
    return [(text.count("\n", 0, m.start()) + 1, "%s: use TestFolder or TestPath of base/test_folder.h" % m.group(0))
            for m in _BARE_FOLDER.finditer(text)]


FILE_RULES = [include_rules, public_headers, torch_umbrella, quotes, header_guard, words, comments, line_length,
              temporary_folders]

# --- BUILD files ----------------------------------------------------------------------------------------------


class _Rules(dict):
    """The names a BUILD file may call: every call is recorded as (rule, attributes)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __missing__(self, name):
        def call(*positional, **attributes):
            self.calls.append((name, attributes))
            return []
        return call


def read_build(text):
    """[(rule, attributes)] of a BUILD file, which is Python as far as this house uses it."""
    rules = _Rules()
    rules["glob"] = lambda include, **_: list(include)
    rules["select"] = lambda options: [item for option in options.values() for item in option]
    rules["load"] = lambda *_: None

    def muster_library(name, srcs=None, hdrs=None, deps=(), test_deps=(), **attributes):
        """As build_defs/muster_library.bzl."""
        attributes.pop("test_size", None)
        rules.calls.append(("cc_library", {
            "name": name, "srcs": [name + ".cc"] if srcs is None else srcs, "hdrs": hdrs or [name + ".h"], "deps": list(deps),
            **attributes}))
        rules.calls.append(("cc_test", {
            "name": name + "_test", "srcs": [name + "_test.cc"],
            "deps": [":" + name, "//third_party:gtest_main"] + list(deps) + list(test_deps)}))

    rules["muster_library"] = muster_library
    exec(compile(text, "BUILD.bazel", "exec"), rules)  # pylint: disable=exec-used
    return rules.calls


def default_visibility(path, calls):
    if any(rule == "package" and attributes.get("default_visibility") for rule, attributes in calls):
        return []
    return [(1, "a BUILD file starts with package(default_visibility = ...)")]


def gtest_only_in_tests(path, calls):
    return [(1, "%s depends on gtest but is not testonly" % attributes.get("name"))
            for rule, attributes in calls
            if rule in ("cc_library", "cc_binary") and not attributes.get("testonly")
            and any(d.startswith("//third_party:gtest") for d in attributes.get("deps", []))]


BUILD_RULES = [default_visibility, gtest_only_in_tests]


def absolute(package, label):
    """//base:log for ":log", "//base:log" or "//base"."""
    if label.startswith(":"):
        return "//%s%s" % (package, label)
    if label.startswith("//") and ":" not in label:
        return "%s:%s" % (label, label.rsplit("/", 1)[-1])
    return label


# A library of headers that stands for what it depends on.
UMBRELLAS = {"//muster:muster"}


def undeclared_includes(builds, read):
    """Includes whose library is not in the deps of the target that includes it: clang's layering check, also for code
    with torch, which is not built with clang. `read` returns a file's text, or None where it is not one of ours."""
    owners, targets = {}, {}
    for path, calls in builds.items():
        package = os.path.dirname(path)
        for rule, attributes in calls:
            if rule not in ("cc_library", "cc_binary", "cc_test") or not attributes.get("name"):
                continue
            label = absolute(package, ":" + attributes["name"])
            headers = attributes.get("hdrs", []) + attributes.get("textual_hdrs", [])
            for header in headers:
                owners.setdefault(os.path.join(package, header), set()).add(label)
            targets[label] = (
                path, [os.path.join(package, f) for f in attributes.get("srcs", []) + headers],
                {absolute(package, d) for d in attributes.get("deps", [])})
    found = []
    for label, (path, files, deps) in sorted(targets.items()):
        deps = deps.union(*(targets[d][2] for d in deps & UMBRELLAS))
        for file in files:
            for _, _, included in includes(read(file) or ""):
                if included in owners and included not in files and not owners[included] & deps:
                    found.append((path, 1, "%s: %s includes %s, and deps lacks %s" % (
                        label, file, included, " or ".join(sorted(owners[included])))))
    return found


def untested(builds, reasons):
    """Libraries with code that no test of their folder (nor any below tests/) reaches through its deps, less those
    with a reason, and reasons that are not needed."""
    libraries, deps, tests = {}, {}, []
    for path, calls in builds.items():
        package = os.path.dirname(path)
        for rule, attributes in calls:
            if not attributes.get("name"):
                continue
            label = absolute(package, ":" + attributes["name"])
            deps[label] = [absolute(package, d) for d in attributes.get("deps", []) + attributes.get("data", [])]
            if rule.endswith("_test"):
                tests.append(label)
            elif (rule == "cc_library" and attributes.get("srcs") and not attributes.get("testonly")
                  and not path.startswith(("third_party/", "tests/", "examples/", "bench/"))):
                libraries[label] = path
    tested = set()
    for test in tests:
        folder, todo, seen = test.split(":")[0], [test], set()
        while todo:
            label = todo.pop()
            if label in seen:
                continue
            seen.add(label)
            todo += deps.get(label, [])
        tested |= {label for label in seen if folder.startswith("//tests") or label.startswith(folder + ":")}
    found = [(libraries[l], 1, "%s: no test of its folder reaches it (or give a reason in tests/style/untested.txt)" % l)
             for l in sorted(set(libraries) - tested - set(reasons))]
    found += [("tests/style/untested.txt", 1, "%s is tested or gone: remove the line" % l)
              for l in sorted(set(reasons)) if l in tested or l not in libraries]
    return found
