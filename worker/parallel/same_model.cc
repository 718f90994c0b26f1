#include "worker/parallel/same_model.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

std::string Describe(const at::Tensor& tensor, const std::string& name, bool sparse) {
  std::ostringstream out;
  out << name << '\n' << tensor.sizes() << ' ' << tensor.scalar_type();
  if (!tensor.requires_grad()) out << " without gradient";
  if (sparse) out << " with sparse gradient";
  return out.str();
}

std::vector<std::string> SplitRecords(const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find('\0', begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  return parts;
}

}  // namespace

void VerifySameModel(Comm& comm, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const std::vector<bool>& sparse) {
  std::string mine;
  for (size_t i = 0; i < parameters.size(); ++i) {
    mine += Describe(parameters[i], names[i], sparse[i]) + '\0';
  }
  const std::string digest =
      std::to_string(parameters.size()) + " " + std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> digests = comm.AllGatherBytes(digest);
  if (std::all_of(digests.begin(), digests.end(), [&](const auto& d) { return d == digests[0]; })) {
    return;
  }
  const std::vector<std::string> all = comm.AllGatherBytes(mine);
  const std::vector<std::string> first = SplitRecords(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const std::vector<std::string> other = SplitRecords(all[rank]);
    for (size_t i = 0; i < std::min(first.size(), other.size()); ++i) {
      if (first[i] == other[i]) continue;
      const auto name = [](const std::string& record) {
        return record.substr(0, record.find('\n'));
      };
      const auto what = [](const std::string& record) {
        return record.substr(record.find('\n') + 1);
      };
      TORCH_CHECK(false, "the models of the ranks differ: parameter ", i, " is '", name(first[i]),
                  "' ", what(first[i]), " on rank 0 but '", name(other[i]), "' ", what(other[i]),
                  " on rank ", rank, "; build the same model on every rank");
    }
    TORCH_CHECK(first.size() == other.size(), "the models of the ranks differ: rank 0 has ",
                first.size(), " parameters and rank ", rank, " has ", other.size(),
                "; build the same model on every rank");
  }
}

}  // namespace muster
