#include "base/slurm_hosts.h"

namespace muster {

std::string FirstSlurmHost(const std::string& node_list) {
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      host += node_list[i];
      continue;
    }
    // "[03-05,9]": the first number, with its zeros, replaces the bracket.
    const size_t close = node_list.find(']', i);
    if (close == std::string::npos) return "";
    const std::string inside = node_list.substr(i + 1, close - i - 1);
    host += inside.substr(0, inside.find_first_of("-,"));
    i = close;
  }
  return host;
}

}  // namespace muster
