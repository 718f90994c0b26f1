#include "worker/checkpoint/node_part.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"

namespace muster {
namespace {

// A file that cannot be examined may be there.
bool IsAbsent(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) != 0 && (errno == ENOENT || errno == ENOTDIR);
}

}  // namespace

bool KeptElsewhere::Has(const std::string& file) const {
  return std::binary_search(files.begin(), files.end(), file);
}

bool KeptElsewhere::HasAny(const std::vector<std::string>& of) const {
  return std::any_of(of.begin(), of.end(), [this](const std::string& file) { return Has(file); });
}

std::string NodeName(const ManifestNode& node) {
  return absl::StrCat("node ", node.host, node.ranks.size() == 1 ? " (rank " : " (ranks ",
                      absl::StrJoin(node.ranks, ", "), ")");
}

KeptElsewhere FindKeptElsewhere(const std::string& dir, const Manifest& manifest) {
  KeptElsewhere elsewhere;
  std::vector<std::string> nodes;
  bool any_here = false;
  for (const ManifestNode& node : manifest.nodes) {
    std::vector<std::string> absent;
    bool here = false;
    for (const ManifestFile& file : manifest.files) {
      if (std::find(node.ranks.begin(), node.ranks.end(), file.rank) == node.ranks.end()) continue;
      if (IsAbsent(JoinPath(dir, file.name))) {
        absent.push_back(file.name);
      } else {
        here = true;
      }
    }
    any_here = any_here || here;
    if (here || absent.empty()) continue;
    nodes.push_back(NodeName(node));
    elsewhere.files.insert(elsewhere.files.end(), absent.begin(), absent.end());
  }
  if (!any_here) return {};
  std::sort(elsewhere.files.begin(), elsewhere.files.end());
  elsewhere.nodes = absl::StrJoin(nodes, " and ");
  return elsewhere;
}

std::string DescribePart(const std::string& dir, const KeptElsewhere& elsewhere) {
  const size_t more = elsewhere.files.size() - 1;
  return absl::StrCat(dir, " is one node's part of a checkpoint: it lacks ",
                      elsewhere.files.front(),
                      more == 0 ? "" : absl::StrCat(" and ", more, " more"), ", which ",
                      elsewhere.nodes, " wrote to a disk of its own");
}

}  // namespace muster
