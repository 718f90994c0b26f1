"""Runs tests/style/rules.py over the repository, and the rules over examples of what they must and must not see."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

_HERE = os.path.dirname(os.path.realpath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))
sys.path.insert(0, _HERE)
sys.path.insert(0, os.path.join(_ROOT, "tools", "internal"))
import public_headers  # noqa: E402
import results  # noqa: E402
import rules  # noqa: E402
import wrap_comments  # noqa: E402


def _files():
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=_ROOT,
                            capture_output=True, text=True, check=True).stdout.splitlines()
    return [f for f in listed if os.path.isfile(os.path.join(_ROOT, f)) and not f.startswith("third_party/")]


def _read(path):
    with open(os.path.join(_ROOT, path), encoding="utf-8") as f:
        return f.read()


def _builds():
    return {f: rules.read_build(_read(f)) for f in _files() if os.path.basename(f) == "BUILD.bazel"}


class Repository(unittest.TestCase):
    def _expect_none(self, found):
        self.assertFalse(found, "\n" + "\n".join("%s:%d: %s" % f for f in found))

    def test_build_files(self):
        found = []
        for path, calls in _builds().items():
            for rule in rules.BUILD_RULES:
                found += [(path,) + f for f in rule(path, calls)]
        self._expect_none(found)

    def test_every_library_is_named_by_a_test(self):
        reasons = {}
        for line in _read("tests/style/untested.txt").splitlines():
            if line and not line.startswith("#"):
                label, _, reason = line.partition(" ")
                self.assertTrue(reason.strip(), "untested.txt: no reason for " + label)
                reasons[label] = reason
        self._expect_none(rules.untested(_builds(), reasons))

    def test_every_include_is_of_a_library_in_deps(self):
        files = set(_files())
        self._expect_none(rules.undeclared_includes(_builds(), lambda f: _read(f) if f in files else None))

    def test_every_error_reason_has_a_row(self):
        reasons = re.findall(r"^  ERROR_REASON_(\w+) = [1-9]", _read("proto/muster/v1/error.proto"), re.MULTILINE)
        rows = re.findall(r"^\| `(\w+)` \|", _read("docs/errors.md"), re.MULTILINE)
        self.assertTrue(reasons)
        self.assertFalse(set(reasons) - set(rows), "docs/errors.md lacks rows")

    def test_services_that_always_restart_do_so_for_ever(self):
        # systemd gives up after five starts in ten seconds, unless the section [Unit] says otherwise.
        services = {path: _read(path) for path in _files() if path.endswith(".service")}
        self.assertTrue(services)
        self._expect_none([(path, 1, "Restart=always without StartLimitIntervalSec=0 in [Unit]") for path, text in services.items()
                           if "\nRestart=always\n" in text and
                           "\nStartLimitIntervalSec=0\n" not in text[text.index("[Unit]"):text.index("[Service]")]])

    def test_no_message_has_a_map_field(self):
        # The ThreadSanitizer build would lay it out differently from Debian's libprotobuf, and crash only there.
        self._expect_none([path for path in _files() if path.endswith(".proto") and "map<" in
                           re.sub("//.*", "", _read(path))])

    def test_every_failpoint_is_in_one_place(self):
        sources = {f: _read(f) for f in _files()
                   if re.match(r"(rpc|coordinator|agent|worker|client|muster)/.*\.(h|cc)$", f)}
        self._expect_none(list(rules.failpoints(_read("base/failpoint.cc"), sources)))

    def test_the_table_of_accelerates_defects_names_tests_that_exist(self):
        tests = set()
        for path in _files():
            if path.endswith("_test.cc"):
                tests |= {(name + "." + case, path) for name, case in
                          re.findall(r"TEST(?:_[FP])?\(\s*(\w+),\s*((?:D\d\d_)+\w+)", _read(path))}
        rows = set(re.findall(r"`(\w+\.D\d\d_\w+)` in ([\w/]+\.cc)", _read("docs/accelerate.md")))
        self.assertTrue(rows)
        self.assertEqual(rows - tests, set(), "docs/accelerate.md names tests that are gone")

    def test_the_table_of_includes_is_the_one_that_is_kept(self):
        rows = re.findall(r"^\| `([\w/]+)` \| ([\w/, ]+) \|$", _read("docs/architecture.md"), re.MULTILINE)
        self.assertEqual({folder: set(names.split(", ")) for folder, names in rows}, rules._ALLOWED)

    def test_public_headers_reach_the_listed_ones_only(self):
        # The headers that a user compiles with muster/muster.h. Each is added here on purpose: templates need it.
        reached = set(public_headers.closure(_ROOT))
        listed = set(_read("tests/style/public_headers.txt").split())
        self.assertEqual(reached - listed, set(), "public headers reach these; forward-declare what they declare")
        self.assertEqual(listed - reached, set(), "no longer reached: take them off tests/style/public_headers.txt")

    def test_the_loop_in_the_readme_is_the_one_that_is_built(self):
        self.assertIn("```cpp\n" + _read("examples/cmake_consumer/main.cc") + "```", _read("README.md"))

    def test_links_between_documents_lead_somewhere(self):
        found = []
        for path in _files():
            if not path.endswith(".md"):
                continue
            for number, line in enumerate(_read(path).splitlines(), 1):
                for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
                    if not os.path.exists(os.path.join(_ROOT, os.path.dirname(path), target)):
                        found.append((path, number, "no file " + target))
        self._expect_none(found)


    def test_documents_name_what_is_there(self):
        found = []
        for path in _files():
            if not path.endswith(".md"):
                continue
            text = _read(path)
            found += [(path,) + f for f in rules.named_paths(text, lambda p: os.path.exists(os.path.join(_ROOT, p)))]
            found += [(path,) + f for f in rules.named_places(
                text, lambda p: _read(p) if os.path.isfile(os.path.join(_ROOT, p)) else None)]
        self._expect_none(found)

    def test_newcomers_pages_name_places(self):
        self.assertGreaterEqual(len(rules.named_places(_read("docs/where_is.md"), lambda _: None)), 20)
        self.assertGreaterEqual(len(rules.named_places(_read("docs/life_of.md"), lambda _: None)), 20)


def _add_file_rule(rule):
    def test(self):
        found = []
        for path in _files():
            if path.endswith((".h", ".cc")):
                found += [(path,) + f for f in rule(path, _read(path))]
        self._expect_none(found)
    setattr(Repository, "test_" + rule.__name__, test)


for _rule in rules.FILE_RULES:
    _add_file_rule(_rule)


class RulesThemselves(unittest.TestCase):
    def _flagged(self, rule, path, text):
        return bool(rule(path, text))

    def test_include_rules(self):
        bad = [
            ("base/a.h", "#include <torch/torch.h>"),
            ("base/a.h", '#include "proto/muster/v1/kv.pb.h"'),
            ("rpc/a.cc", '#include "coordinator/core.h"'),
            ("rpc/session/a.h", "#include <grpcpp/grpcpp.h>"),
            ("rpc/session/a.cc", '#include "rpc/status.h"'),
            ("coordinator/barrier.h", "#include <grpcpp/grpcpp.h>"),
            ("coordinator/barrier.h", '#include "rpc/status.h"'),
            ("coordinator/barrier.h", '#include "proto/muster/v1/barrier.grpc.pb.h"'),
            ("coordinator/service/a.cc", "#include <ATen/core/Tensor.h>"),
            ("agent/a.cc", '#include "worker/data/loader.h"'),
            ("worker/job/a.cc", '#include "agent/relay.h"'),
            ("worker/nested/a.cc", '#include "worker/collective/comm.h"'),
            ("worker/data/a.cc", '#include "worker/train/seed.h"'),
            ("worker/job/a.cc", '#include "worker/data/loader.h"'),
            ("muster/a.cc", '#include "agent/relay.h"'),
            ("coordinator/core.cc", "#include <sqlite3.h>"),
            ("coordinator/core.cc", '#include "coordinator/journal/sqlite_journal.h"'),
            ("worker/train/a.cc", '#include "rpc/channel.h"'),
            ("worker/train/a.cc", '#include "client/job_client.h"'),
            ("client/a.cc", '#include "coordinator/core.h"'),
            ("muster/a.cc", '#include "coordinator/core.h"'),
            ("examples/mnist/main.cc", '#include "worker/data/loader.h"'),
            ("base/a.cc", "#include <gtest/gtest.h>"),
        ]
        good = [
            ("base/a.h", '#include "absl/strings/string_view.h"\n#include <vector>'),
            ("base/a_test.cc", "#include <gtest/gtest.h>"),
            ("coordinator/barrier.h", '#include "proto/muster/v1/barrier.pb.h"'),
            ("coordinator/barrier.h", '#include "rpc/session/answer.h"'),
            ("coordinator/service/a.cc", "#include <grpcpp/grpcpp.h>"),
            ("coordinator/service/a.cc", '#include "rpc/session/answer.h"'),
            ("agent/a.cc", '#include "rpc/session/answer.h"'),
            ("worker/job/store.cc", '#include "rpc/channel.h"'),
            ("worker/data/a.cc", '#include "worker/collective/comm.h"'),
            ("worker/parallel/a_test.cc", '#include "worker/train/optimizer.h"'),
            ("coordinator/journal/a.cc", "#include <sqlite3.h>"),
            ("worker/train/a.cc", "#include <ATen/core/Tensor.h>"),
            ("examples/mnist/main.cc", '#include "muster/muster.h"'),
            ("tests/e2e/a_test.cc", '#include "coordinator/core.h"'),
        ]
        for path, text in bad:
            self.assertTrue(self._flagged(rules.include_rules, path, text), (path, text))
        for path, text in good:
            self.assertFalse(self._flagged(rules.include_rules, path, text), (path, text))

    def test_headers(self):
        self.assertTrue(self._flagged(rules.public_headers, "muster/a.h", "#include <grpcpp/grpcpp.h>"))
        self.assertFalse(self._flagged(rules.public_headers, "muster/a.cc", "#include <grpcpp/grpcpp.h>"))
        self.assertTrue(self._flagged(rules.torch_umbrella, "worker/a.h", "#include <torch/torch.h>"))
        self.assertFalse(self._flagged(rules.torch_umbrella, "worker/a.cc", "#include <torch/torch.h>"))
        self.assertTrue(self._flagged(rules.quotes, "base/a.cc", "#include <base/log.h>"))
        guarded = "#ifndef MUSTER_BASE_A_H_\n#define MUSTER_BASE_A_H_\n#endif  // MUSTER_BASE_A_H_\n"
        self.assertFalse(self._flagged(rules.header_guard, "base/a.h", guarded))
        self.assertTrue(self._flagged(rules.header_guard, "base/b.h", guarded))

    def test_words(self):
        bad = ["absl::Mutex mu;", "std::mutex m;", "absl::SleepFor(x);", "LOG(INFO) << 1;", "CHECK_EQ(a, b);",
               "TEST(A, DISABLED_B) {}", "  sleep(1);", "std::system(\"ls\");", "using namespace std;"]
        good = ["// absl::Mutex is not used", 'Run("sleep 1000");', "MUSTER_LOG(Info) << 1;", "TORCH_CHECK(a);",
                "tensor.detach();", "using namespace std::literals;", 'const char* s = R"(system("x"))";',
                "INTERNAL_ASSERT_CHECKED(x)", "c10::filesystem(x)"]
        for text in bad:
            self.assertTrue(self._flagged(rules.words, "worker/a.cc", text), text)
        for text in good:
            self.assertFalse(self._flagged(rules.words, "worker/a.cc", text), text)

    def test_temporary_folders(self):
        for text in ("x = ::testing::TempDir() + name;", 'std::getenv("TEST_TMPDIR");', "mkdtemp(path.data());"):
            for path in ("base/a_test.cc", "muster/test_a.h", "tests/chaos/a.cc"):
                self.assertTrue(self._flagged(rules.temporary_folders, path, text), text)
            for path in ("agent/relay.cc", "base/test_folder.h"):
                self.assertFalse(self._flagged(rules.temporary_folders, path, text), text)
        self.assertFalse(self._flagged(rules.temporary_folders, "base/a_test.cc", "const TestFolder folder;"))

    def test_failpoints(self):
        table = '    {"a.b", true, "x"},\n    {"a.c",\n     false, "y"},\n'
        good = {"worker/a.cc": 'MUSTER_FAILPOINT_STATUS("a.b"); MUSTER_FAILPOINT("a.c");'}
        self.assertFalse(list(rules.failpoints(table, good)))
        for bad in ['MUSTER_FAILPOINT_STATUS("a.b");', 'MUSTER_FAILPOINT("a.b"); MUSTER_FAILPOINT("a.c");',
                    good["worker/a.cc"] + 'MUSTER_FAILPOINT("a.c");', good["worker/a.cc"] + 'MUSTER_FAILPOINT("a.d");']:
            self.assertTrue(list(rules.failpoints(table, {"worker/a.cc": bad})), bad)

    def test_comments(self):
        self.assertTrue(self._flagged(rules.comments, "a.cc", "// TODO: later"))
        self.assertFalse(self._flagged(rules.comments, "a.cc", "// TODO(#12): when gRPC 1.60 is there"))
        self.assertTrue(self._flagged(rules.comments, "a.cc", "// ----------------"))
        for text in ("// Of ranks that died.", "x;\n  // Who asks again has a reason to.", "// It is told so.", "x();  // anew"):
            self.assertTrue(self._flagged(rules.comments, "a.cc", text), text)
        for text in ("// Removes the files\n// of ranks that died.", "// The name\n// Of it.", 'Log("it is told");'):
            self.assertFalse(self._flagged(rules.comments, "a.cc", text), text)
        self.assertTrue(self._flagged(rules.line_length, "a.cc", "// " + "x" * 98))
        self.assertFalse(self._flagged(rules.line_length, "a.cc", "// " + "\u2588" * 97))

    def test_comments_that_are_too_long_are_broken(self):
        word = "x" * 60
        self.assertEqual(wrap_comments.wrap("  // %s %s\n  // y\n  // - z" % (word, word)),
                         "  // %s\n  // %s y\n  // - z" % (word, word))
        self.assertEqual(wrap_comments.wrap("// - %s %s\n//   y\n// z" % (word, word)),
                         "// - %s\n//   %s y\n// z" % (word, word))
        for kept in ("// short\n// lines", "//   code " + "x" * 80, 'f("// %s");' % (word * 2)):
            self.assertEqual(wrap_comments.wrap(kept), kept)

    def test_documents(self):
        self.assertTrue(rules.named_paths("`base/gone.h`", lambda _: False))
        self.assertTrue(rules.named_paths("see `worker/gone`.", lambda _: False))
        self.assertFalse(rules.named_paths("`base/log`, `a/b`, `//base:log`", lambda p: p == "base/log.h"))
        self.assertTrue(rules.named_places("`A::B` in `base/a.cc`", lambda _: "void A::Bc() {}"))
        self.assertTrue(rules.named_places("`B` in\n`base/a.cc`", lambda _: None))
        self.assertFalse(rules.named_places("`A::B` in `base/a.cc`", lambda _: "void A::B() {}"))

    def test_build_files(self):
        calls = rules.read_build('cc_library(name = "a", srcs = ["a.cc"], deps = ["//third_party:gtest"])')
        self.assertTrue(rules.default_visibility("a/BUILD.bazel", calls))
        self.assertTrue(rules.gtest_only_in_tests("a/BUILD.bazel", calls))
        self.assertTrue(rules.untested({"a/BUILD.bazel": calls}, {}))
        self.assertFalse(rules.untested({"a/BUILD.bazel": calls}, {"//a:a": "why"}))
        tested = rules.read_build('cc_library(name = "a", srcs = ["a.cc"])\ncc_test(name = "t", deps = [":a"])')
        self.assertFalse(rules.untested({"a/BUILD.bazel": tested}, {}))
        self.assertTrue(rules.untested({"a/BUILD.bazel": tested}, {"//a:a": "stale"}))
        both = rules.read_build('muster_library(name = "a", deps = ["//b:c"], test_deps = ["//b:d"])')
        self.assertFalse(rules.untested({"a/BUILD.bazel": both}, {}))
        self.assertFalse(rules.gtest_only_in_tests("a/BUILD.bazel", both))

    def test_includes_of_libraries_that_deps_lacks(self):
        texts = {"a/a.cc": '#include "a/a.h"\n#include "b/b.h"\n', "a/a.h": '#include "muster/data.h"\n'}

        def flagged(deps):
            builds = {
                "a/BUILD.bazel": 'muster_library(name = "a", deps = %s)' % deps,
                "b/BUILD.bazel": 'cc_library(name = "b", hdrs = ["b.h"])',
                "muster/BUILD.bazel": 'cc_library(name = "muster", deps = [":data"])\n'
                                      'cc_library(name = "data", hdrs = ["data.h"])'}
            builds = {path: rules.read_build(text) for path, text in builds.items()}
            return [message.split(" lacks ")[1] for _, _, message in rules.undeclared_includes(builds, texts.get)]

        self.assertEqual(flagged([]), ["//b:b", "//muster:data"])
        self.assertEqual(flagged(["//b"]), ["//muster:data"])
        self.assertFalse(flagged(["//b", "//muster:data"]))
        self.assertFalse(flagged(["//b", "//muster"]))


class Results(unittest.TestCase):
    def test_a_program_that_crashed_says_where(self):
        # Bazel writes this for a program that has left no result.
        xml = """<testsuites><testsuite name="a_test" tests="1" failures="0" errors="1">
            <testcase name="a_test" status="run"><error message="exited with error code 141"></error></testcase>
            <system-out><![CDATA[[ RUN      ] A.Good
[       OK ] A.Good (1 ms)
%s]]></system-out></testsuite></testsuites>"""
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            for log, where in (("[ RUN      ] A.Bad\n", ", in A.Bad"), ("", "")):
                file.seek(0)
                file.truncate()
                file.write(xml % log)
                file.flush()
                self.assertEqual(results.cases(file.name), (0, ["(exited with error code 141%s)" % where]))


class _XmlResult(unittest.TextTestResult):
    """Also writes the XML that Bazel reads."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.names = []

    def startTest(self, test):
        self.names.append(test.id().split(".")[-2:])
        super().startTest(test)

    def write_xml(self, path):
        failed = {tuple(test.id().split(".")[-2:]) for test, _ in self.failures + self.errors}
        with open(path, "w", encoding="utf-8") as f:
            f.write('<testsuites><testsuite name="style" tests="%d" failures="%d">\n' % (len(self.names), len(failed)))
            for suite, name in self.names:
                f.write('<testcase classname="%s" name="%s">%s</testcase>\n' % (
                    suite, name, '<failure message="see the log"/>' if (suite, name) in failed else ""))
            f.write("</testsuite></testsuites>\n")


if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    result = unittest.TextTestRunner(stream=sys.stdout, resultclass=_XmlResult).run(suite)
    if os.environ.get("XML_OUTPUT_FILE"):
        result.write_xml(os.environ["XML_OUTPUT_FILE"])
    sys.exit(0 if result.wasSuccessful() else 1)
