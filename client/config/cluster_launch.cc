#include "client/config/cluster_launch.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/slurm_hosts.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::client {
namespace {

using Variables = std::map<std::string, std::string>;

const std::string* Find(const Variables& variables, const std::string& name) {
  const auto it = variables.find(name);
  return it == variables.end() || it->second.empty() ? nullptr : &it->second;
}

absl::StatusOr<std::optional<int64_t>> Number(const Variables& variables, const std::string& name,
                                              int64_t least = 0) {
  const std::string* const text = Find(variables, name);
  if (text == nullptr) return std::nullopt;
  int64_t value = 0;
  if (absl::SimpleAtoi(*text, &value) && value >= least && value <= INT32_MAX) return value;
  return absl::InvalidArgumentError(
      absl::StrCat(name, "=", Printable(*text), " is not a number from ", least, " to ", INT32_MAX,
                   ": unset it, or say which machine this is (--num_machines, --machine_rank)"));
}

void Set(const std::string& name, int64_t value, const std::string& source, Layer* layer) {
  layer->settings[name] = {absl::StrCat(value), source};
}

absl::Status SeveralOnAMachine(absl::string_view launcher, int64_t count, const std::string& source,
                               absl::string_view instead) {
  return absl::InvalidArgumentError(
      absl::StrCat(launcher, " has started this command ", count, " times on this machine (",
                   source, "), and each would start all processes of the machine: write ", instead,
                   ", or let ", launcher, " start the program itself, without muster launch"));
}

struct MpiFamily {
  const char *rank, *size, *local_size;
};
// srun --mpi=pmi2 also sets the first two variables of the last family, so SLURM's own variables
// come first.
constexpr MpiFamily kMpi[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"}};
constexpr MpiFamily kPmi = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"};

// Returns nullopt if the process was not started by this family.
absl::StatusOr<std::optional<Layer>> FromMpi(const MpiFamily& family, const Variables& variables) {
  MUSTER_ASSIGN_OR_RETURN(const auto rank, Number(variables, family.rank));
  MUSTER_ASSIGN_OR_RETURN(const auto size, Number(variables, family.size, 1));
  MUSTER_ASSIGN_OR_RETURN(const auto here, Number(variables, family.local_size, 1));
  if (!rank.has_value() || !size.has_value()) return std::nullopt;
  if (*size > 1 && here.value_or(1) > 1) {
    return SeveralOnAMachine("mpirun", *here, family.local_size, "mpirun --map-by ppr:1:node");
  }
  Layer layer;
  if (*size > 1) {
    Set("num_machines", *size, family.size, &layer);
    Set("machine_rank", *rank, family.rank, &layer);
  }
  return layer;
}

absl::StatusOr<Layer> FromSlurmStep(const Variables& variables) {
  MUSTER_ASSIGN_OR_RETURN(const auto tasks, Number(variables, "SLURM_STEP_NUM_TASKS", 1));
  MUSTER_ASSIGN_OR_RETURN(const auto all_tasks, Number(variables, "SLURM_NTASKS", 1));
  MUSTER_ASSIGN_OR_RETURN(const auto nodes, Number(variables, "SLURM_STEP_NUM_NODES", 1));
  MUSTER_ASSIGN_OR_RETURN(const auto all_nodes, Number(variables, "SLURM_NNODES", 1));
  MUSTER_ASSIGN_OR_RETURN(const auto node, Number(variables, "SLURM_NODEID"));
  MUSTER_ASSIGN_OR_RETURN(const auto job, Number(variables, "SLURM_JOB_ID"));
  MUSTER_ASSIGN_OR_RETURN(const auto step, Number(variables, "SLURM_STEP_ID"));
  const int64_t count = tasks.value_or(all_tasks.value_or(1));
  const int64_t machines = nodes.value_or(all_nodes.value_or(1));
  Layer layer;
  if (count <= 1) return layer;
  if (count > machines) {
    const std::string* const each = Find(variables, "SLURM_STEP_TASKS_PER_NODE");
    return SeveralOnAMachine("srun", (count + machines - 1) / machines,
                             each == nullptr
                                 ? "SLURM_NTASKS"
                                 : absl::StrCat("SLURM_STEP_TASKS_PER_NODE=", Printable(*each)),
                             "srun --ntasks-per-node=1");
  }
  Set("num_machines", count, nodes.has_value() ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES", &layer);
  if (!node.has_value()) {
    return absl::InvalidArgumentError(
        "srun has started several of this command, and SLURM_NODEID does not say which this is: "
        "give --num_machines and --machine_rank");
  }
  Set("machine_rank", *node, "SLURM_NODEID", &layer);
  for (const char* const name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    const std::string* const list = Find(variables, name);
    const std::string host = list == nullptr ? "" : FirstSlurmHost(*list);
    if (host.empty()) continue;
    layer.settings["main_process_ip"] = {host, name};
    break;
  }
  // Different for jobs that share a node, and for steps of one job.
  Set("main_process_port", 25000 + (job.value_or(0) + 61 * (step.value_or(0) % 1000)) % 7000,
      "SLURM_JOB_ID", &layer);
  return layer;
}

}  // namespace

absl::StatusOr<std::string> AddressOfHost(const std::string& host) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (code != 0) {
    return absl::UnavailableError(
        absl::StrCat("host ", Printable(host), " has no address here: ", gai_strerror(code),
                     "; give --main_process_ip, an address of machine 0"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(list, &freeaddrinfo);
  std::string found;
  bool loopback = false;
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    char text[INET6_ADDRSTRLEN] = "";
    if (one->ai_family == AF_INET) {
      const auto* const v4 = reinterpret_cast<const sockaddr_in*>(one->ai_addr);
      if ((ntohl(v4->sin_addr.s_addr) >> 24) == 127) {
        loopback = true;
      } else {
        // All machines must choose the same one: IPv4 before IPv6.
        return std::string(inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text)));
      }
    } else if (one->ai_family == AF_INET6) {
      const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(one->ai_addr);
      if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) {
        loopback = true;
      } else if (!IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr) && found.empty()) {
        found = inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
      }
    }
  }
  if (!found.empty()) return found;
  return absl::FailedPreconditionError(absl::StrCat(
      "host ", Printable(host), loopback ? " is a loopback address here" : " has no address",
      ", and other machines could not reach it: give --main_process_ip, an address of machine 0"));
}

absl::StatusOr<Layer> LayerFromCluster(const Variables& variables) {
  // mpirun starts its daemons by srun: their children have the variables of both families, and
  // those of SLURM describe the daemon.
  for (const MpiFamily& family : kMpi) {
    MUSTER_ASSIGN_OR_RETURN(auto layer, FromMpi(family, variables));
    if (layer.has_value()) return *std::move(layer);
  }
  const bool in_step = Find(variables, "SLURM_STEP_ID") != nullptr ||
                       Find(variables, "SLURM_STEP_NUM_TASKS") != nullptr;
  if (in_step && Find(variables, "SLURM_PROCID") != nullptr) return FromSlurmStep(variables);
  MUSTER_ASSIGN_OR_RETURN(auto layer, FromMpi(kPmi, variables));
  if (layer.has_value()) return *std::move(layer);
  if (Find(variables, "SLURM_JOB_ID") != nullptr) {
    MUSTER_ASSIGN_OR_RETURN(const auto nodes, Number(variables, "SLURM_NNODES", 1));
    if (nodes.value_or(1) > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the SLURM job has ", *nodes,
          " nodes (SLURM_NNODES), and this launch would run on one of them: write srun "
          "--ntasks-per-node=1 muster launch ..., or --num_machines 1 to use only this node"));
    }
  }
  return Layer();
}

}  // namespace muster::client
