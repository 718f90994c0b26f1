#include "agent/python_symbols.h"

#include <unistd.h>

#include <climits>
#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file.h"

namespace muster::agent {
namespace {

struct Search {
  std::string executable;  // path of the executable; empty: not known
  PythonSymbols found;
};

int OnModule(Dwfl_Module* module, void**, const char* name, Dwarf_Addr, void* argument) {
  Search& search = *static_cast<Search*>(argument);
  const absl::string_view path = name;
  const std::string file = BaseName(path);
  // Other libraries are skipped: some have a million symbols.
  if (path != search.executable && !absl::StartsWith(file, "libpython") &&
      !absl::StartsWith(file, "python")) {
    return DWARF_CB_OK;
  }
  PythonSymbols symbols;
  const int count = dwfl_module_getsymtab(module);
  for (int i = 0; i < count; ++i) {
    GElf_Sym symbol;
    GElf_Addr address = 0;
    const char* const text =
        dwfl_module_getsym_info(module, i, &symbol, &address, nullptr, nullptr, nullptr);
    if (text == nullptr || symbol.st_shndx == SHN_UNDEF) continue;
    if (strcmp(text, "_PyRuntime") == 0) symbols.runtime = address;
    if (strcmp(text, "Py_Version") == 0) symbols.version = address;
  }
  if (symbols.runtime == 0) return DWARF_CB_OK;
  symbols.file = file;
  search.found = std::move(symbols);
  return DWARF_CB_ABORT;
}

}  // namespace

std::optional<PythonSymbols> FindPython(Dwfl* dwfl, pid_t pid) {
  Search search;
  char path[PATH_MAX];
  const ssize_t size = readlink(absl::StrCat("/proc/", pid, "/exe").c_str(), path, sizeof(path));
  if (size > 0) search.executable.assign(path, static_cast<size_t>(size));
  dwfl_getmodules(dwfl, OnModule, &search, 0);
  if (search.found.runtime == 0) return std::nullopt;
  return std::move(search.found);
}

}  // namespace muster::agent
