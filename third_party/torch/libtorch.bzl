"""LibTorch from the PyPI wheels that tools/setup unpacked.

The directory is $MUSTER_DEPS, or ~/.cache/muster/deps/torch-2.11.0. Headers come in as a Bazel repository;
libraries are linked by absolute path, because libtorch_cpu.so finds its CUDA companions relative to where
it really lies (its RPATH starts at $ORIGIN), which Bazel's library links would hide.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# Everything a CPU program needs. The old google/protobuf of the wheel is left out of the header list on
# purpose; still, keep torch and protobuf in separate translation units.
cc_library(
    name = "torch",
    hdrs = glob(
        ["include/**/*.h", "include/**/*.hpp", "include/**/*.cuh", "include/**/*.inc"],
        exclude = ["include/google/**", "include/pybind11/**", "include/caffe2/**"],
    ),
    defines = ["USE_DISTRIBUTED", "USE_C10D_GLOO"],
    includes = ["include", "include/torch/csrc/api/include"],
    linkopts = [
        "-L{lib}",
        "-Wl,-rpath,$$ORIGIN/../lib/muster/torch/lib",
        "-Wl,-rpath,$$ORIGIN/muster/torch/lib",
        "-Wl,-rpath,{lib}",
        "-Wl,--no-as-needed",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,--as-needed",
    ],
)

# Headers that ProcessGroupNCCL.hpp and the CUDA guards include; empty on a machine set up without them.
cc_library(
    name = "cuda_headers",
    hdrs = glob(["cuda/*/include/**"], allow_empty = True),
    defines = ["USE_C10D_NCCL"],
    includes = ["cuda/cu13/include", "cuda/nccl/include"],
)
"""

def _libtorch_impl(repository_ctx):
    root = repository_ctx.os.environ.get("MUSTER_DEPS", "")
    if not root:
        root = repository_ctx.os.environ.get("HOME", "/root") + "/.cache/muster/deps/torch-2.11.0"
    if not repository_ctx.path(root + "/torch/lib/libtorch_cpu.so").exists:
        fail("LibTorch is not under %s: run tools/setup first (or set MUSTER_DEPS)" % root)
    repository_ctx.symlink(root + "/torch/include", "include")
    repository_ctx.symlink(root + "/nvidia", "cuda")
    repository_ctx.file("BUILD.bazel", _BUILD.format(lib = root + "/torch/lib"))

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ["MUSTER_DEPS", "HOME"],
    local = True,
)
