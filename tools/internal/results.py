"""Counts the test cases of Bazel runs and of tools/test's own steps.

    results.py [--step NAME=passed|failed]... [--cut] EVENTS.json...

EVENTS.json are files of `bazel test --build_event_json_file`. Prints what failed, one line each, and last
'N passed, N failed' alone on a line; exits 1 if anything failed or nothing ran. A test program counts by its
cases; one that crashed, timed out or was not built counts as one failed case, with what ended it and the
GoogleTest case that it was in. After --cut comes a file of a run that was ended early: what was not done by then
counts as neither.
"""

import json
import re
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def unfinished(log):
    """The GoogleTest case that a log begins and does not end, or None."""
    found = None
    for verdict, name in re.findall(r"^\[( RUN      |       OK |  FAILED  |  SKIPPED )\] (\S+)", log, re.MULTILINE):
        found = name if verdict == " RUN      " else None
    return found


def how_it_ended(root, error):
    """Of a program that left no test.xml, for which Bazel wrote one: what it says, and where that happened."""
    running = unfinished("\n".join(out.text or "" for out in root.iter("system-out")))
    return "(%s%s)" % (error.get("message") or "crashed", ", in " + running if running else "")


def cases(xml_path):
    """(passed, [failed case names]) of one test.xml, or None if it cannot be read."""
    try:
        root = ElementTree.parse(xml_path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    passed, failed = 0, []
    for case in root.iter("testcase"):
        if case.get("status") == "notrun" or case.get("result") in ("skipped", "suppressed"):
            continue
        error = case.find("error")
        if error is not None and not case.get("classname"):
            failed.append(how_it_ended(root, error))
        elif error is not None or case.find("failure") is not None:
            failed.append("%s.%s" % (case.get("classname", ""), case.get("name", "")))
        else:
            passed += 1
    return passed, failed


def read_events(path, cut):
    """{label: [(status, xml path)]} for every test that was asked for; if `cut`, without those of an interrupted run."""
    tests = {}
    try:
        lines = open(path, encoding="utf-8").readlines()
    except OSError:
        return tests
    for line in lines:
        event = json.loads(line)
        identity = event.get("id", {})
        if cut and event.get("aborted", {}).get("reason") == "USER_INTERRUPTED":
            continue
        if "testResult" in identity:
            key = identity["testResult"]["label"]
            result = event.get("testResult", {})
            xml = next((o["uri"] for o in result.get("testActionOutput", []) if o["name"] == "test.xml"), "")
            tests.setdefault(key, []).append(
                (result.get("status", "NO_STATUS"), urllib.parse.unquote(urllib.parse.urlparse(xml).path)))
        elif "testSummary" in identity:
            tests.setdefault(identity["testSummary"]["label"], [])
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success", False):
            tests[identity["targetCompleted"]["label"]] = [("did not build", "")]
    return tests


def main():
    passed, failed = 0, []
    arguments = sys.argv[1:]
    while arguments and arguments[0] == "--step":
        name, verdict = arguments[1].rsplit("=", 1)
        arguments = arguments[2:]
        if verdict == "passed":
            passed += 1
        else:
            failed.append(name)
    cut = False
    for path in arguments:
        if path == "--cut":
            cut = True
            continue
        tests, cut = read_events(path, cut), False
        for label, results in sorted(tests.items()):
            if not results:
                failed.append(label + " (not run)")
            for status, xml in results:
                counted = cases(xml)
                if counted:
                    passed += counted[0]
                    late = " (TIMEOUT)" if status == "TIMEOUT" else ""
                    failed += ["%s %s%s" % (label, name, late) for name in counted[1]]
                if status not in ("PASSED", "FLAKY") and not (counted and counted[1]):
                    failed.append("%s (%s)" % (label, status))
    for name in failed:
        print("FAILED: " + name)
    print("%d passed, %d failed" % (passed, len(failed)))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
