#include "coordinator/jobs/placement.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

int Cpus(const v1::ProcessResources& process) { return std::max(1, process.cpus()); }

struct Fit {
  const std::string* name;
  const CandidateNode* node;
  int processes;
};

// Returns `count` of these nodes, all of which fit `each` processes.
std::vector<Fit> Choose(std::vector<Fit> fits, size_t count) {
  if (fits.size() > count) {
    absl::btree_map<absl::string_view, size_t> rack_sizes;
    for (const Fit& fit : fits) ++rack_sizes[fit.node->info->rack()];
    // The smallest rack that has room for all of them leaves larger racks to larger jobs; if there
    // is none, taking the largest racks uses the fewest.
    const auto rank_of = [&](const Fit& fit) {
      const size_t size = rack_sizes[fit.node->info->rack()];
      return size >= count ? std::make_pair(0, size)
                           : std::make_pair(1, std::numeric_limits<size_t>::max() - size);
    };
    std::sort(fits.begin(), fits.end(), [&](const Fit& a, const Fit& b) {
      return std::make_tuple(rank_of(a), absl::string_view(a.node->info->rack()), a.processes,
                             absl::string_view(*a.name)) <
             std::make_tuple(rank_of(b), absl::string_view(b.node->info->rack()), b.processes,
                             absl::string_view(*b.name));
    });
    fits.resize(count);
  }
  std::sort(fits.begin(), fits.end(), [](const Fit& a, const Fit& b) {
    const auto key = [](const Fit& fit) {
      return std::make_tuple(absl::string_view(fit.node->info->rack()),
                             absl::string_view(fit.node->info->nvlink_domain()),
                             absl::string_view(*fit.name));
    };
    return key(a) < key(b);
  });
  return fits;
}

bool HasLabels(const v1::JobSpec& spec, const v1::NodeInfo& info) {
  return std::all_of(
      spec.node_labels().begin(), spec.node_labels().end(), [&](const v1::NameValue& wanted) {
        return std::any_of(
            info.labels().begin(), info.labels().end(), [&](const v1::NameValue& label) {
              return label.name() == wanted.name() && label.value() == wanted.value();
            });
      });
}

// Returns whether the node can take the job's files: an older agent would start it without them.
bool TakesFiles(const v1::JobSpec& spec, const v1::NodeInfo& info) {
  return spec.files_size() == 0 || info.takes_files();
}

// The nodes on which an attempt fits, and how well.
struct Room {
  std::vector<Fit> fits;  // nodes that fit at least one process
  int processes = 0;      // of the attempt; 0: it does not fit
  int each = 0;           // on each node
  int most = 0;           // the most that fit, whether that is enough or not
  int without_labels = 0, too_old = 0, of_no_use = 0;  // numbers of nodes
};
Room FindRoom(const v1::JobSpec& spec,
              const google::protobuf::RepeatedPtrField<std::string>& avoided,
              const CandidateNodes& nodes, int at_most) {
  Room room;
  const int max_processes = std::min(spec.max_processes(), at_most);
  int largest = 0;
  for (const auto& [name, node] : nodes) {
    if (!HasLabels(spec, *node.info)) {
      ++room.without_labels;
      continue;
    }
    if (!TakesFiles(spec, *node.info)) {
      ++room.too_old;
      continue;
    }
    if (std::find(avoided.begin(), avoided.end(), name) != avoided.end()) {
      ++room.of_no_use;
      continue;
    }
    const int processes = node.space.Fits(spec.per_process());
    if (processes > 0) room.fits.push_back({&name, &node, processes});
    largest = std::max(largest, processes);
  }
  const int from =
      spec.processes_per_node() > 0 ? spec.processes_per_node() : std::min(largest, max_processes);
  const int to = spec.processes_per_node() > 0 ? spec.processes_per_node() : 1;
  // The number of nodes that have room for each number of processes.
  std::vector<int> nodes_with(std::max(0, from) + 1);
  for (const Fit& fit : room.fits) ++nodes_with[std::min(fit.processes, from)];
  for (int each = from - 1; each >= to; --each) nodes_with[each] += nodes_with[each + 1];
  for (int each = from; each >= to && room.processes < max_processes; --each) {
    const int total = each * std::min(nodes_with[each], max_processes / each);
    room.most = std::max(room.most, total);
    if (total >= spec.min_processes() && total > room.processes) {
      room.processes = total;
      room.each = each;
    }
  }
  return room;
}

// Makes a placement without a node_rank and a state.
v1::Placement Occupy(const std::string& name, const CandidateNode& node, int processes,
                     const v1::ProcessResources& process) {
  v1::Placement placement;
  placement.set_node(name);
  placement.set_node_uid(node.uid);
  placement.set_processes(processes);
  if (process.gpus() == 0) return placement;
  const std::vector<int> gpus = node.space.GpusFor(process);
  for (int i = 0; i < processes * process.gpus(); ++i) placement.add_gpus(gpus[i]);
  return placement;
}

}  // namespace

std::vector<int> NodeSpace::GpusFor(const v1::ProcessResources& process) const {
  std::vector<int> fit;
  for (const int gpu : gpus) {
    if (process.gpu_memory_bytes() > 0) {
      // A GPU of unknown memory may have too little.
      const bool known = info != nullptr && gpu < info->gpu_memory_bytes_size();
      if (!known || info->gpu_memory_bytes(gpu) < process.gpu_memory_bytes()) continue;
    }
    fit.push_back(gpu);
  }
  return fit;
}

int NodeSpace::Fits(const v1::ProcessResources& process) const {
  int fits = std::max(0, cpus) / Cpus(process);
  if (process.gpus() > 0) {
    const size_t fit = process.gpu_memory_bytes() > 0 ? GpusFor(process).size() : gpus.size();
    fits = std::min(fits, static_cast<int>(fit) / process.gpus());
  }
  if (process.memory_bytes() > 0) {
    fits = static_cast<int>(
        std::min<int64_t>(fits, std::max<int64_t>(0, memory) / process.memory_bytes()));
  }
  return fits;
}

void NodeSpace::Take(const v1::Placement& placement, const v1::ProcessResources& process) {
  cpus -= placement.processes() * Cpus(process);
  memory -= placement.processes() * process.memory_bytes();
  for (const int gpu : placement.gpus()) gpus.erase(gpu);
}

void NodeSpace::Give(const v1::Placement& placement, const v1::ProcessResources& process) {
  cpus += placement.processes() * Cpus(process);
  memory += placement.processes() * process.memory_bytes();
  for (const int gpu : placement.gpus()) {
    // The node may have come back with fewer GPUs.
    if (info == nullptr || gpu < info->gpus_size()) gpus.insert(gpu);
  }
}

void NodeSpace::AtMost(const NodeSpace& later) {
  cpus = std::min(cpus, later.cpus);
  memory = std::min(memory, later.memory);
  for (auto it = gpus.begin(); it != gpus.end();) {
    it = later.gpus.contains(*it) ? std::next(it) : gpus.erase(it);
  }
}

int CountProcesses(const v1::JobAttempt& attempt) {
  int processes = 0;
  for (const v1::Placement& placement : attempt.placements()) processes += placement.processes();
  return processes;
}

std::string DescribeSize(const v1::JobSpec& spec) {
  return spec.min_processes() == spec.max_processes()
             ? absl::StrCat(spec.max_processes(),
                            spec.max_processes() == 1 ? " process" : " processes")
             : absl::StrCat(spec.min_processes(), " to ", spec.max_processes(), " processes");
}

std::string DescribeDemand(const v1::JobSpec& spec) {
  const v1::ProcessResources& process = spec.per_process();
  std::vector<std::string> parts;
  if (process.gpus() > 0) {
    std::string gpus = absl::StrCat(process.gpus(), process.gpus() == 1 ? " GPU" : " GPUs");
    if (process.gpu_memory_bytes() > 0) {
      absl::StrAppend(&gpus, " of ", (process.gpu_memory_bytes() + (1 << 20) - 1) >> 20, " MiB");
    }
    parts.push_back(std::move(gpus));
  }
  parts.push_back(absl::StrCat(Cpus(process), Cpus(process) == 1 ? " CPU" : " CPUs"));
  if (process.memory_bytes() > 0) {
    parts.push_back(absl::StrCat((process.memory_bytes() + (1 << 20) - 1) >> 20, " MiB"));
  }
  std::string text = DescribeSize(spec);
  if (spec.processes_per_node() > 0) {
    absl::StrAppend(&text, ", ", spec.processes_per_node(), " on each node,");
  }
  absl::StrAppend(&text, " with ", absl::StrJoin(parts, ", "));
  if (spec.max_processes() > 1) absl::StrAppend(&text, " each");
  if (spec.node_labels_size() > 0) {
    std::vector<std::string> labels;
    for (const v1::NameValue& label : spec.node_labels()) {
      labels.push_back(absl::StrCat(label.name(), "=", label.value()));
    }
    std::sort(labels.begin(), labels.end());
    absl::StrAppend(&text, " on nodes with ", absl::StrJoin(labels, ", "));
  }
  return text;
}

bool HasRoom(const v1::JobSpec& spec,
             const google::protobuf::RepeatedPtrField<std::string>& avoided,
             const CandidateNodes& nodes, int at_most) {
  return FindRoom(spec, avoided, nodes, at_most).processes > 0;
}

PlacementDecision Place(const v1::JobSpec& spec,
                        const google::protobuf::RepeatedPtrField<std::string>& avoided,
                        const CandidateNodes& nodes, int at_most) {
  PlacementDecision decision;
  Room room = FindRoom(spec, avoided, nodes, at_most);
  if (room.processes == 0) {
    decision.why = absl::StrCat("room for ", DescribeDemand(spec), ": ");
    if (nodes.empty()) {
      absl::StrAppend(&decision.why, "no node takes jobs (muster nodes shows why)");
    } else if (room.without_labels == static_cast<int>(nodes.size())) {
      absl::StrAppend(&decision.why, "no node has these labels");
    } else {
      absl::StrAppend(&decision.why,
                      room.most == 0 ? "no node has it" : absl::StrCat(room.most, " fit"));
    }
    if (room.too_old > 0) {
      absl::StrAppend(
          &decision.why, " (", room.too_old,
          room.too_old == 1 ? " node has an agent that is" : " nodes have agents that are",
          " too old for a job with files: update ", room.too_old == 1 ? "it)" : "them)");
    }
    if (room.of_no_use > 0) {
      absl::StrAppend(&decision.why, " (", room.of_no_use,
                      room.of_no_use == 1 ? " node is avoided: it" : " nodes are avoided: they",
                      " could not start the job)");
    }
    return decision;
  }
  std::vector<Fit>& fits = room.fits;
  fits.erase(std::remove_if(fits.begin(), fits.end(),
                            [&](const Fit& fit) { return fit.processes < room.each; }),
             fits.end());
  int rank = 0;
  for (const Fit& fit : Choose(std::move(fits), room.processes / room.each)) {
    v1::Placement& placement = decision.placements.emplace_back(
        Occupy(*fit.name, *fit.node, room.each, spec.per_process()));
    placement.set_node_rank(rank++);
    placement.set_state(v1::PLACEMENT_STATE_ASSIGNED);
  }
  decision.processes = room.processes;
  if (spec.spare_nodes() > 0) {
    std::vector<const v1::Placement*> taken;
    for (const v1::Placement& placement : decision.placements) taken.push_back(&placement);
    decision.spares = PlaceSpares(spec, room.each, spec.spare_nodes(), avoided, taken, nodes);
  }
  return decision;
}

std::vector<v1::Placement> PlaceSpares(
    const v1::JobSpec& spec, int each, int count,
    const google::protobuf::RepeatedPtrField<std::string>& avoided,
    const std::vector<const v1::Placement*>& taken, const CandidateNodes& nodes) {
  absl::btree_set<absl::string_view> used, racks;
  used.insert(avoided.begin(), avoided.end());
  for (const v1::Placement* const placement : taken) {
    used.insert(placement->node());
    if (const auto it = nodes.find(placement->node()); it != nodes.end()) {
      racks.insert(it->second.info->rack());
    }
  }
  std::vector<Fit> fits;
  for (const auto& [name, node] : nodes) {
    if (used.contains(name) || !HasLabels(spec, *node.info) || !TakesFiles(spec, *node.info)) {
      continue;
    }
    const int processes = node.space.Fits(spec.per_process());
    if (processes >= each) fits.push_back({&name, &node, processes});
  }
  std::stable_sort(fits.begin(), fits.end(), [&](const Fit& a, const Fit& b) {
    const auto key = [&](const Fit& fit) {
      return std::make_pair(!racks.contains(fit.node->info->rack()), fit.processes);
    };
    return key(a) < key(b);
  });
  std::vector<v1::Placement> spares;
  for (const Fit& fit : fits) {
    if (static_cast<int>(spares.size()) >= count) break;
    spares.push_back(Occupy(*fit.name, *fit.node, each, spec.per_process()));
  }
  return spares;
}

}  // namespace muster::coordinator
