"""What a program that uses a library is compiled with."""

def _library_headers_impl(ctx):
    context = ctx.attr.library[CcInfo].compilation_context
    # One of LibTorch's 9,000 headers leads to the folder of all.
    headers = [
        h
        for h in context.headers.to_list()
        if not h.path.startswith("external/") or h.path.endswith("/api/include/torch/torch.h")
    ]
    macros = ctx.actions.declare_file(ctx.label.name + "_macros.txt")
    ctx.actions.write(macros, "\n".join(context.defines.to_list()))
    return [DefaultInfo(runfiles = ctx.runfiles(files = headers + [macros]))]

# The headers of a library, and its macros in NAME_macros.txt, as data for a test that calls the compiler itself.
library_headers = rule(
    implementation = _library_headers_impl,
    attrs = {"library": attr.label(providers = [CcInfo])},
)
