"""A library and its test, as most targets of this repository are."""

def _in_order(deps):
    """Without repetitions, those of the same package first."""
    unique = sorted({dep: None for dep in deps})
    return [dep for dep in unique if dep.startswith(":")] + [dep for dep in unique if not dep.startswith(":")]

def muster_library(name, srcs = None, hdrs = None, deps = [], test_deps = [], test_size = "small", **kwargs):
    """NAME.cc and NAME.h as a cc_library, and NAME_test.cc as its cc_test with GoogleTest.

    Args:
      name: of the library; the test is NAME_test.
      srcs: [NAME.cc] unless given; [] for a library of headers.
      hdrs: [NAME.h] unless given.
      deps: of the library. The test has them too.
      test_deps: what the test needs besides.
      test_size: of the test.
      **kwargs: other attributes of the library.
    """
    native.cc_library(
        name = name,
        srcs = [name + ".cc"] if srcs == None else srcs,
        hdrs = [name + ".h"] if hdrs == None else hdrs,
        deps = deps,
        **kwargs
    )
    native.cc_test(
        name = name + "_test",
        size = test_size,
        srcs = [name + "_test.cc"],
        deps = _in_order([":" + name, "//third_party:gtest_main"] + deps + test_deps),
    )
