#include "client/cli/node_commands.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/text.h"
#include "base/units.h"
#include "client/cli/connection.h"
#include "client/cli/output.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/job_client.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

constexpr char kExitCodes[] =
    "Exit codes: 0 done; 2 wrong options; 3 no such node; 7 no coordinator answers; 8 it requires "
    "a token, or a\ndifferent one.";

std::string StateOf(const Node& node) {
  if (node.lost) return "LOST";
  if (!node.known) return "NOT HEARD";
  if (node.draining) return "DRAINING";
  return node.cordoned ? "CORDONED" : "READY";
}

ordered_json NodeJson(const Node& node) {
  return {{"node", node.name},
          {"state", StateOf(node)},
          {"why", node.why},
          {"host", node.host},
          {"version", node.version},
          {"cpus", node.cpus},
          {"used_cpus", node.used_cpus},
          {"memory_bytes", node.memory_bytes},
          {"used_memory_bytes", node.used_memory_bytes},
          {"gpus", node.gpus},
          {"gpu_memory_bytes", node.gpu_memory_bytes},
          {"used_gpus", node.used_gpus},
          {"labels", node.labels},
          {"rack", node.rack},
          {"nvlink_domain", node.nvlink_domain},
          {"limits", node.limits},
          {"limits_why", node.limits_why},
          {"heard_ago_seconds", absl::ToDoubleSeconds(node.heard_ago)},
          {"log_level", node.log_level},
          {"jobs", node.jobs},
          {"spare_of", node.spare_of}};
}

// Returns "8 x 80.0 GiB", "1 x 80.0 GiB, 1 x ?": GPUs with the same memory together.
std::string GpuMemoryText(const Node& node) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < node.gpus.size();) {
    const auto at = [&](size_t index) {
      return index < node.gpu_memory_bytes.size() ? node.gpu_memory_bytes[index] : 0;
    };
    size_t same = i + 1;
    while (same < node.gpus.size() && at(same) == at(i)) ++same;
    parts.push_back(absl::StrCat(same - i, " x ", at(i) > 0 ? HumanBytes(at(i)) : "?"));
    i = same;
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

int RunNodesCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster nodes",
      .summary = "Lists the machines whose agents wait for jobs (muster-agent --serve).",
      .usage = "[OPTIONS]",
      .details = kExitCodes,
      .options = ConnectionOptions({OutputOption({"table", "wide", "json", "yaml", "name"})})};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const std::string format = line.Has("output") ? line.Get("output") : "table";
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  Client client = ClientOn(connection.channel, connection.timeout, connection.timeout);
  const absl::StatusOr<std::vector<Node>> nodes = client.nodes();
  if (!nodes.ok()) return FailCall(spec, context, nodes.status());
  if (format == "json" || format == "yaml") {
    ordered_json all = ordered_json::array();
    for (const Node& node : *nodes) all.push_back(NodeJson(node));
    context.out << (format == "json" ? Dump(all) : YamlText(all));
    return kExitOk;
  }
  const bool wide = format == "wide";
  std::vector<std::vector<std::string>> rows = {
      {"NODE", "STATE", "CPUS", "GPUS", "MEMORY", "JOBS"}};
  if (wide)
    rows[0].insert(rows[0].end(),
                   {"HEARD", "RACK", "NVLINK", "GPU MEMORY", "LABELS", "LIMITS", "VERSION"});
  rows[0].push_back("WHY");
  for (const Node& node : *nodes) {
    std::vector<std::string> jobs = node.jobs;
    for (const std::string& job : node.spare_of) jobs.push_back(job + " (spare)");
    std::vector<std::string> row = {
        node.name,
        StateOf(node),
        absl::StrCat(node.used_cpus, "/", node.cpus),
        absl::StrCat(node.used_gpus.size(), "/", node.gpus.size()),
        absl::StrCat(HumanBytes(node.used_memory_bytes), " / ", HumanBytes(node.memory_bytes)),
        absl::StrJoin(jobs, ",")};
    if (wide) {
      row.insert(row.end(),
                 {HumanDuration(node.heard_ago) + " ago", node.rack, node.nvlink_domain,
                  GpuMemoryText(node), absl::StrJoin(node.labels, ",", absl::PairFormatter("=")),
                  node.limits.empty() ? "none" : absl::StrJoin(node.limits, ","), node.version});
    }
    row.push_back(node.why);
    rows.push_back(std::move(row));
  }
  if (format == "name") {
    for (const Node& node : *nodes) context.out << Printable(node.name) << "\n";
  } else {
    context.out << TableText(rows, context.columns);
  }
  return kExitOk;
}

int RunNodeControlCommand(const std::string& verb, const std::vector<std::string>& args,
                          const CommandContext& context) {
  std::vector<OptionSpec> options;
  if (verb != "uncordon")
    options.push_back(
        {.name = "why", .value_name = "TEXT", .help = "The reason that muster nodes shows"});
  const CommandSpec spec = {
      .name = "muster " + verb,
      .summary = verb == "cordon"  ? "Starts nothing new on a node."
                 : verb == "drain" ? "Stops the jobs on a node, which are queued again, and starts "
                                     "nothing new there."
                                   : "Lets jobs start on a node again.",
      .usage = "NODE [OPTIONS]",
      .details = kExitCodes,
      .options = ConnectionOptions(std::move(options)),
      .max_words = 1};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.size() != 1) {
    return Fail(spec, context,
                absl::InvalidArgumentError(
                    absl::StrCat("write ", spec.name, " NODE; muster nodes shows the nodes")),
                kExitUsage);
  }
  const std::string node = line.words[0];
  Connection connection;
  if (const int code = Dial(spec, line, context, &connection); code >= 0) return code;
  Client client = ClientOn(connection.channel, connection.timeout, connection.timeout);
  const absl::Status status = verb == "cordon"  ? client.cordon(node, line.Get("why"))
                              : verb == "drain" ? client.drain(node, line.Get("why"))
                                                : client.uncordon(node);
  if (absl::IsNotFound(status)) {
    std::vector<std::string> names;
    if (const auto nodes = client.nodes(); nodes.ok()) {
      for (const Node& known : *nodes) names.push_back(known.name);
    }
    return Fail(spec, context, SuggestName(status, node, names), kExitNotFound);
  }
  if (!status.ok()) return FailCall(spec, context, status);
  context.out << "node " << node
              << (verb == "cordon"  ? " is cordoned\n"
                  : verb == "drain" ? " is draining\n"
                                    : " takes jobs again\n");
  return kExitOk;
}

}  // namespace muster::client
