"""C++ protobuf and gRPC code from .proto files, with Debian's protoc and plug-in."""

def muster_proto_library(name, srcs, deps = [], grpc = False, visibility = None):
    """Generates and compiles the C++ of `srcs`, paths from the repository root.

    Args:
      name: the cc_library.
      srcs: the .proto files; imports are written `proto/muster/v1/x.proto`.
      deps: other muster_proto_library targets that the files import.
      grpc: also generate service stubs (`*.grpc.pb.h`).
      visibility: of the cc_library.
    """
    outs = []
    for src in srcs:
        stem = src[:-len(".proto")]
        outs += [stem + ".pb.cc", stem + ".pb.h"]
        if grpc:
            outs += [stem + ".grpc.pb.cc", stem + ".grpc.pb.h"]
    native.filegroup(
        name = name + "_srcs",
        srcs = srcs + [d + "_srcs" for d in deps],
        visibility = visibility,
    )
    plugin = "--grpc_out=$(GENDIR) --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin" if grpc else ""
    native.genrule(
        name = name + "_gen",
        srcs = srcs + [d + "_srcs" for d in deps],
        outs = outs,
        cmd = "protoc -I. --cpp_out=$(GENDIR) %s %s" % (
            plugin,
            " ".join(["$(location %s)" % s for s in srcs]),
        ),
    )
    native.cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".cc")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-w"],
        visibility = visibility,
        deps = deps + ["//third_party:grpc" if grpc else "//third_party:protobuf"],
    )
