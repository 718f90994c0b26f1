#include "worker/checkpoint/clean_path.h"

#include <filesystem>
#include <system_error>

#include "base/home_path.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

std::string Normal(const fs::path& path) {
  std::string clean = path.lexically_normal().string();
  while (clean.size() > 1 && clean.back() == '/') clean.pop_back();
  // Of "./~": a folder of that name, also when the result is cleaned once more.
  return BeginsAtHome(clean) ? "./" + clean : clean;
}

}  // namespace

std::string CleanPath(const std::string& given) {
  if (given.empty()) return given;
  const std::string path = WithHome(given);
  // The part that ends with the last ".." after a name, and the rest.
  fs::path seen, head, tail;
  bool has_name = false;
  for (const fs::path& part : fs::path(path)) {
    seen /= part;
    if (part == ".." && has_name) {
      head = seen;
      tail.clear();
      continue;
    }
    has_name = has_name || (part != "." && part != ".." && part != "/");
    if (!head.empty()) tail /= part;
  }
  std::error_code error;
  const fs::path resolved = head.empty() ? head : fs::canonical(head, error);
  return Normal(head.empty() || error ? fs::path(path) : resolved / tail);
}

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(WithHome(path), error);
  return error ? path : CleanPath(absolute.string());
}

}  // namespace muster
