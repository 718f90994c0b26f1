"""C++ protobuf and gRPC code from .proto files, with Debian's protoc and plug-in."""

def _stem(src):
    return src[:-len(".proto")]

def muster_proto_library(name, srcs):
    """Generates and compiles the messages of `srcs` (C++ `<file>.pb.h`).

    Args:
      name: the cc_library; `name_srcs` is a filegroup of the .proto files.
      srcs: the .proto files, which may import each other as `proto/<path>`.
    """
    native.filegroup(name = name + "_srcs", srcs = srcs)
    outs = [_stem(s) + ext for s in srcs for ext in [".pb.cc", ".pb.h"]]
    native.genrule(
        name = name + "_gen",
        srcs = srcs,
        outs = outs,
        cmd = "protoc -I. --cpp_out=$(GENDIR) $(SRCS)",
    )
    native.cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".cc")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-w"],
        deps = ["//third_party:protobuf"],
    )

def muster_grpc_library(name, srcs, protos):
    """Generates and compiles the gRPC stubs of `srcs` (C++ `<file>.grpc.pb.h`).

    Args:
      name: the cc_library.
      srcs: the .proto files with services.
      protos: the muster_proto_library that holds all of them.
    """
    outs = [_stem(s) + ext for s in srcs for ext in [".grpc.pb.cc", ".grpc.pb.h"]]
    native.genrule(
        name = name + "_gen",
        srcs = srcs + [protos + "_srcs"],
        outs = outs,
        cmd = "protoc -I. --grpc_out=$(GENDIR) --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin %s" %
              " ".join(["$(location %s)" % s for s in srcs]),
    )
    native.cc_library(
        name = name,
        srcs = [o for o in outs if o.endswith(".cc")],
        hdrs = [o for o in outs if o.endswith(".h")],
        copts = ["-w"],
        deps = [protos, "//third_party:grpc"],
    )
