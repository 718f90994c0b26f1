#include "client/config/config_dialog.h"

#include <algorithm>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/bool_word.h"
#include "base/defaults.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/units.h"
#include "proto/job_limits.h"
#include "rpc/address.h"

namespace muster::client {
namespace {

constexpr char kUnits[] = "MUSTER_SHARDING_UNITS";
constexpr char kDefaultPort[] = "29400";

absl::Status Refused(absl::string_view answer, absl::string_view why) {
  return absl::InvalidArgumentError(
      answer.empty() ? absl::StrCat("an answer is needed: ", why)
                     : absl::StrCat(Printable(answer, 60), " is no answer: ", why));
}

const std::vector<DialogChoice>& YesNo() {
  static const auto* const choices = new std::vector<DialogChoice>{{"yes", "yes"}, {"no", "no"}};
  return *choices;
}

// The answers so far, and the other known facts.
class Answers {
 public:
  explicit Answers(const DialogFacts& facts) : facts(facts) {}

  // The answer to an earlier question; empty: not asked, or left empty.
  std::string Get(const std::string& name) const {
    const auto it = taken.find(name);
    return it == taken.end() ? "" : it->second;
  }
  bool Is(const std::string& name, absl::string_view value) const { return Get(name) == value; }
  int Int(const std::string& name, int otherwise) const {
    int value = 0;
    return absl::SimpleAtoi(Get(name), &value) ? value : otherwise;
  }

  bool several() const { return Is("layout", "several"); }
  bool cluster() const { return Is("layout", "cluster"); }
  bool on_gpus() const { return Is("cpu", "gpu"); }
  int machines() const { return ParseMachines(Get("num_machines")).value_or(MachineCount()).most; }
  bool machines_vary() const {
    const MachineCount count = ParseMachines(Get("num_machines")).value_or(MachineCount());
    return count.least < count.most;
  }
  bool loopback() const {
    const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(Get("coordinator"));
    return address.ok() && address->is_loopback();
  }
  // GPUs of this machine that the job uses.
  int gpus_here() const {
    if (!on_gpus()) return 0;
    const std::string ids = Get("gpu_ids");
    if (ids.empty()) return facts.usable_gpus;
    return static_cast<int>(SplitGpuIds(ids).size());
  }

  // The value of a setting in a file or a flag; empty: none.
  std::string Former(const std::string& name) const {
    const auto given = facts.given.find(name);
    if (given != facts.given.end()) return given->second;
    if (!keeps_former()) return "";
    const auto it = facts.former->settings.find(name);
    return it == facts.former->settings.end() ? "" : it->second.text;
  }
  // Whether the processes divide a model, according to the answers.
  bool shards() const {
    const std::string sharding = Get("sharding");
    return absl::StartsWith(sharding, "zero") || sharding == "hybrid";
  }
  bool FormerBool(const std::string& name) const { return ParseBool(Former(name)).value_or(false); }
  bool keeps_former() const { return facts.former.has_value() && Is("existing", "change"); }

  const DialogFacts& facts;
  std::map<std::string, std::string> taken;
};

// One step of the dialog. Each sees only the answers to earlier steps.
struct Step {
  std::string name;
  std::function<bool(const Answers&)> asked = nullptr;
  // Its suggestion is the default, used if no other source has one.
  std::function<DialogQuestion(const Answers&)> question = nullptr;
  // Returns the suggestion from a file or flag; null: the value of the setting of this name.
  std::function<std::string(const Answers&)> former = nullptr;
  // Converts the answer to the form that is kept. Null: the choices or the setting's rule decide.
  std::function<absl::StatusOr<std::string>(const Answers&, const std::string&)> read = nullptr;
};

bool Always(const Answers&) { return true; }

std::string YesOrNo(bool yes) { return yes ? "yes" : "no"; }

// "This machine has 2 cores, 7.75 GiB of memory and no GPU."
std::string MachineText(const DialogFacts& facts) {
  return absl::StrCat(
      "This machine has ", facts.cores, facts.cores == 1 ? " core, " : " cores, ",
      facts.memory_bytes > 0 ? absl::StrCat(HumanBytes(facts.memory_bytes), " of memory")
                             : "memory",
      " and ",
      facts.gpus == 0   ? "no GPU"
      : facts.gpus == 1 ? "1 GPU"
                        : absl::StrCat(facts.gpus, " GPUs"),
      facts.gpus == facts.usable_gpus
          ? ""
          : absl::StrCat(", of which CUDA_VISIBLE_DEVICES lets programs use ", facts.usable_gpus),
      ".");
}

absl::StatusOr<std::string> ReadByRule(const SettingSpec& spec, const std::string& answer) {
  if (FitsRule(spec, answer)) return answer;
  return Refused(answer, absl::StrCat("write ", ValueRule(spec)));
}

absl::StatusOr<std::string> ReadFilePath(const Answers& answers, const std::string& name,
                                         const std::string& answer) {
  if (answer.empty()) return Refused(answer, "write the path of the file");
  if (answers.facts.find_file == nullptr) return answer;
  return answers.facts.find_file(name, answer, answers.taken);
}

absl::StatusOr<std::string> ReadMachines(const std::string& answer) {
  const std::optional<MachineCount> machines = ParseMachines(answer);
  if (machines.has_value() && machines->most >= 2) return answer;
  return Refused(answer, "write a whole number of at least 2, or a range such as 1:4");
}

absl::StatusOr<std::string> ReadMachineRank(const Answers& answers, const std::string& answer) {
  int rank = 0;
  if (absl::SimpleAtoi(answer, &rank) && rank >= 0 && rank < answers.machines()) return answer;
  return Refused(answer, absl::StrCat("write a whole number from 0 to ", answers.machines() - 1,
                                      "; machines are numbered from 0"));
}

// "10.0.0.5", "10.0.0.5:29400", "::1", "[::1]:29400".
absl::StatusOr<std::string> ReadCoordinator(const std::string& answer) {
  constexpr char kWrite[] =
      "write the numeric address of machine 0 and a port, such as 10.0.0.5:29400";
  std::string text = answer;
  if (!absl::StrContains(text, ':')) {
    absl::StrAppend(&text, ":", kDefaultPort);
  } else if (!absl::StartsWith(text, "[") && std::count(text.begin(), text.end(), ':') > 1) {
    text = absl::StrCat("[", text, "]:", kDefaultPort);
  }
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(text);
  if (!address.ok() || address->is_unix() || address->port == 0) return Refused(answer, kWrite);
  if (address->host == "0.0.0.0" || address->host == "::") {
    return Refused(answer, "the other machines cannot call it; write an address of machine 0");
  }
  return address->ToString();
}

absl::StatusOr<std::string> ReadGpuIds(const Answers& answers, const std::string& answer) {
  if (answer == "all") return std::string();
  const int gpus = answers.facts.gpus;
  const std::string write = gpus == 1 ? "write 0 or all"
                                      : absl::StrCat("write all, or numbers from 0 to ", gpus - 1,
                                                     ", such as 0,", gpus - 1);
  std::vector<std::string> ids;
  for (absl::string_view id : absl::StrSplit(answer, ',')) {
    id = absl::StripAsciiWhitespace(id);
    int number = 0;
    const bool named = absl::StartsWith(id, "GPU-") || absl::StartsWith(id, "MIG-");
    if (!named && (!absl::SimpleAtoi(id, &number) || number < 0 || number >= gpus)) {
      return Refused(answer, write);
    }
    const std::string word = named ? std::string(id) : absl::StrCat(number);
    if (std::count(ids.begin(), ids.end(), word) != 0) {
      return Refused(answer, absl::StrCat(id, " is listed twice; ", write));
    }
    ids.push_back(word);
  }
  if (static_cast<int>(ids.size()) > gpus) return Refused(answer, write);
  return absl::StrJoin(ids, ",");
}

absl::StatusOr<std::string> ReadProcesses(const Answers& answers, const std::string& answer) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text,
                          ReadByRule(*FindSetting("num_processes"), answer));
  int processes = 0;
  if (!absl::SimpleAtoi(text, &processes)) return Refused(answer, "write a whole number");
  const int machines = answers.machines();
  if (processes % machines != 0) {
    const int below = processes / machines * machines;
    return Refused(
        answer,
        absl::StrCat(machines, " machines must have the same number of processes each; write ",
                     below > 0 ? absl::StrCat(below, " or ") : "", below + machines));
  }
  const int gpus = answers.gpus_here();
  if (gpus > 0 && processes / machines > gpus) {
    return Refused(answer,
                   absl::StrCat("each process needs a GPU of its own, and this machine uses ", gpus,
                                "; write ", gpus * machines, " at most"));
  }
  return text;
}

absl::StatusOr<std::string> ReadUnits(const std::string& answer) {
  for (const absl::string_view name : absl::StrSplit(answer, ',')) {
    const absl::string_view word = absl::StripAsciiWhitespace(name);
    if (word.empty() || word.find_first_of(" \t\"'") != absl::string_view::npos) {
      return Refused(answer, "write comma-separated class names, such as Block or Encoder,Decoder");
    }
  }
  return absl::StrJoin(absl::StrSplit(answer, absl::ByAnyChar(", \t"), absl::SkipEmpty()), ",");
}

absl::StatusOr<std::string> ReadLease(const std::string& answer) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadByRule(*FindSetting("lease"), answer));
  absl::Duration lease;
  if (absl::ParseDuration(text, &lease) && lease >= kShortestLease) return text;
  return Refused(answer, absl::StrCat("write at least ", absl::FormatDuration(kShortestLease)));
}

absl::StatusOr<std::string> ReadHangTimeout(const std::string& answer) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadByRule(*FindSetting("hang_timeout"), answer));
  absl::Duration time;
  if (absl::ParseDuration(text, &time) &&
      (time == absl::ZeroDuration() || time >= kLeastHangTimeout)) {
    return text;
  }
  return Refused(answer, absl::StrCat("write at least ", absl::FormatDuration(kLeastHangTimeout),
                                      ", or 0 for none"));
}

absl::StatusOr<std::string> ReadHub(const std::string& answer) {
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(answer);
  if (address.ok() && !address->is_unix()) return answer;
  return Refused(answer, "write an address of this machine and a port, such as 10.0.0.5:0");
}

// Asks about a setting of the table that no other step has; only for users who want more settings.
Step StepOfSetting(const SettingSpec& spec) {
  Step step = {.name = spec.name, .asked = [](const Answers& a) { return a.Is("more", "yes"); }};
  const bool is_bool = spec.type == SettingSpec::Type::kBool;
  step.question = [&spec, is_bool](const Answers&) {
    DialogQuestion question = {.text = absl::StrCat(spec.name, "?"),
                               .note = absl::StrCat(spec.help, "."),
                               .suggestion = spec.fallback,
                               .optional = spec.fallback.empty()};
    if (is_bool) {
      question.choices = {{"default", "the default"}, {"yes", "yes"}, {"no", "no"}};
      question.suggestion = "default";
    }
    return question;
  };
  if (is_bool) {
    step.former = [&spec](const Answers& a) {
      const std::string former = a.Former(spec.name);
      return former.empty() ? "" : YesOrNo(a.FormerBool(spec.name));
    };
  } else if (spec.name == "lease") {
    step.read = [](const Answers&, const std::string& text) { return ReadLease(text); };
  } else if (spec.name == "hang_timeout") {
    step.read = [](const Answers&, const std::string& text) { return ReadHangTimeout(text); };
  } else if (spec.name == "hub_listen") {
    step.read = [](const Answers&, const std::string& text) { return ReadHub(text); };
  } else if (spec.name == "checkpoint_key") {
    step.read = [](const Answers& a, const std::string& text) {
      return ReadFilePath(a, "checkpoint_key", text);
    };
  }
  if (spec.name == "log_max_mib" || spec.name == "log_files") {
    step.asked = [](const Answers& a) { return a.Is("more", "yes") && !a.Get("log_dir").empty(); };
  }
  if (spec.of_sharding) {
    step.asked = [](const Answers& a) { return a.Is("more", "yes") && a.shards(); };
  }
  if (spec.name == "offload_parameters") {
    step.asked = [](const Answers& a) {
      return a.Is("more", "yes") && (a.Is("sharding", "zero3") || a.Is("sharding", "hybrid"));
    };
  }
  if (spec.name == "last_call" || spec.name == "grow_after") {
    step.asked = [](const Answers& a) { return a.Is("more", "yes") && a.machines_vary(); };
  }
  return step;
}

Step FileStep(const std::string& name, const std::string& text, const std::string& note,
              std::function<bool(const Answers&)> asked) {
  return {.name = name,
          .asked = std::move(asked),
          .question = [text,
                       note](const Answers&) { return DialogQuestion{.text = text, .note = note}; },
          .read = [name](const Answers& a,
                         const std::string& answer) { return ReadFilePath(a, name, answer); }};
}

// Adds the steps about the machines, and how they trust each other.
void AddMachineSteps(std::vector<Step>* steps) {
  steps->push_back(
      {.name = "existing",
       .asked = [](const Answers& a) { return a.facts.exists; },
       .question =
           [](const Answers& a) {
             DialogQuestion question = {
                 .text =
                     absl::StrCat(Printable(a.facts.path), " exists. What should happen to it?"),
                 .note = a.facts.former.has_value()
                             ? ""
                             : absl::StrCat("Its settings cannot be taken over: ",
                                            a.facts.why_no_former, "."),
                 .suggestion = "leave"};
             if (a.facts.former.has_value()) {
               question.choices.push_back(
                   {"change", "change it: its settings are suggested, its comments are lost"});
             }
             question.choices.push_back({"replace", "replace it by a new one"});
             question.choices.push_back({"leave", "leave it as it is, and end here"});
             return question;
           },
       .former = [](const Answers&) { return std::string(); }});
  steps->push_back(
      {.name = "layout",
       .asked = Always,
       .question =
           [](const Answers&) {
             return DialogQuestion{
                 .text = "Where do the processes of a job run?",
                 .choices = {{"one", "on this machine"},
                             {"several", "on several machines; the same command starts on each"},
                             {"cluster", "on the machines that SLURM or MPI gives to the job"}},
                 .suggestion = "one"};
           },
       .former =
           [](const Answers& a) {
             return ParseMachines(a.Former("num_machines")).value_or(MachineCount()).most > 1
                        ? "several"
                        : "";
           }});
  const auto several = [](const Answers& a) { return a.several(); };
  steps->push_back(
      {.name = "num_machines",
       .asked = several,
       .question =
           [](const Answers&) {
             return DialogQuestion{.text = "How many machines?", .suggestion = "2"};
           },
       .read = [](const Answers&, const std::string& answer) { return ReadMachines(answer); }});
  steps->push_back(
      {.name = "machine_rank",
       .asked = several,
       .question =
           [](const Answers& a) {
             return DialogQuestion{
                 .text = absl::StrCat("Which of them is this machine, from 0 to ", a.machines() - 1,
                                      "?"),
                 .note =
                     "Machine 0 hosts the coordinator. Each machine needs a file of its own, or "
                     "--machine_rank.",
                 .suggestion = "0"};
           },
       .read = ReadMachineRank});
  steps->push_back(
      {.name = "coordinator",
       .asked = several,
       .question =
           [](const Answers&) {
             return DialogQuestion{
                 .text = "At which address do all machines reach machine 0?",
                 .note = absl::StrCat("A numeric address and a free port, as 10.0.0.5:",
                                      kDefaultPort, "; without a port ", kDefaultPort, ".")};
           },
       .former =
           [](const Answers& a) {
             const std::string ip = a.Former("main_process_ip");
             if (ip.empty()) return std::string();
             return absl::StrCat(absl::StrContains(ip, ':') ? absl::StrCat("[", ip, "]") : ip, ":",
                                 a.Former("main_process_port"));
           },
       .read = [](const Answers&, const std::string& answer) { return ReadCoordinator(answer); }});
  steps->push_back(
      {.name = "access",
       .asked = [](const Answers& a) { return a.cluster() || (a.several() && !a.loopback()); },
       .question =
           [](const Answers& a) {
             DialogQuestion question = {
                 .text = "How does the coordinator know its callers?",
                 .note =
                     "Other users can reach its port, so calls are encrypted and authenticated.",
                 .choices = {{"certificates", "each machine has its own certificate"},
                             {"token",
                              "all machines share a token; only machine 0 has a certificate"}},
                 .suggestion = "certificates"};
             if (a.cluster()) {
               question.choices.push_back(
                   {"flags", "set by flags of the launch, as in deploy/slurm/train.sbatch"});
               question.suggestion = "flags";
             }
             return question;
           },
       .former =
           [](const Answers& a) {
             return !a.Former("token_file").empty() ? "token"
                    : !a.Former("tls_ca").empty()   ? "certificates"
                                                    : "";
           }});
  const auto encrypted = [](const Answers& a) {
    return a.Is("access", "certificates") || a.Is("access", "token");
  };
  // Machine 0 serves TLS, and any machine of a cluster can be machine 0.
  const auto certified = [](const Answers& a) {
    return a.Is("access", "certificates") ||
           (a.Is("access", "token") && a.Int("machine_rank", 0) == 0);
  };
  steps->push_back(FileStep(
      "token_file", "Which file has the token?",
      "The same on all machines, of mode 0600. openssl rand -hex 32 makes one.",
      [](const Answers& a) { return a.Is("access", "token") || (a.several() && a.loopback()); }));
  steps->push_back(FileStep("tls_ca", "Which file has the CA certificate (PEM)?",
                            "It signs the certificates of the machines.", encrypted));
  steps->push_back(
      FileStep("tls_cert", "Which file has this machine's certificate (PEM)?", "", certified));
  steps->push_back(FileStep("tls_key", "Which file has the private key of that certificate (PEM)?",
                            "Readable only by its owner.", certified));
}

// Adds the steps about devices and processes.
void AddProcessSteps(std::vector<Step>* steps) {
  steps->push_back(
      {.name = "cpu",
       .asked = Always,
       .question =
           [](const Answers& a) {
             return DialogQuestion{
                 .text = "What do the processes train on?",
                 .note = MachineText(a.facts),
                 .choices = {{"gpu",
                              a.facts.gpus > 0
                                  ? "GPUs"
                                  : "GPUs, or the CPU on a machine without one, such as this one"},
                             {"cpu", "the CPU, even if there are GPUs"}},
                 .suggestion = a.facts.usable_gpus > 0 ? "gpu" : "cpu"};
           },
       .former =
           [](const Answers& a) {
             const std::string former = a.Former("cpu");
             return former.empty() ? "" : a.FormerBool("cpu") ? "cpu" : "gpu";
           }});
  steps->push_back(
      {.name = "gpu_ids",
       .asked = [](const Answers& a) { return a.on_gpus() && a.facts.gpus > 0 && !a.cluster(); },
       .question =
           [](const Answers& a) {
             return DialogQuestion{
                 .text = "Which GPUs of this machine?",
                 .note = absl::StrCat("It has ", a.facts.gpus,
                                      ", numbered from 0. Write all, or comma-separated numbers."),
                 .suggestion = "all"};
           },
       .read = ReadGpuIds});
  steps->push_back(
      {.name = "num_processes",
       // One for each GPU, on whatever machines the cluster assigns.
       .asked = [](const Answers& a) { return !a.cluster() || !a.on_gpus(); },
       .question =
           [](const Answers& a) {
             DialogQuestion question = {
                 .text = a.machines() > 1 ? absl::StrCat("How many processes on all ", a.machines(),
                                                         " machines together?")
                                          : "How many processes?"};
             if (a.cluster()) {
               question.text = "How many processes on all machines together?";
               question.note = "Empty: one per machine.";
               question.optional = true;
               return question;
             }
             const int here = std::max(1, a.gpus_here());
             question.note =
                 a.gpus_here() > 0
                     ? "One for each GPU is usual."
                     : absl::StrCat("Each holds a model and takes a share of the cores. ",
                                    MachineText(a.facts));
             question.suggestion = absl::StrCat(here * a.machines());
             return question;
           },
       .read = ReadProcesses});
  steps->push_back(
      {.name = "num_cpu_threads_per_process",
       .asked = [](const Answers& a) { return !a.on_gpus(); },
       .question =
           [](const Answers& a) {
             const int here = std::max(1, a.Int("num_processes", a.machines()) / a.machines());
             return DialogQuestion{
                 .text = "How many threads does each process use (OMP_NUM_THREADS)?",
                 .note = absl::StrCat(
                     "Empty: the inherited value, else an equal share of the cores, here ",
                     std::max(1, a.facts.cores / here), "."),
                 .optional = true};
           }});
}

// Adds the steps about the program.
void AddTrainingSteps(std::vector<Step>* steps) {
  steps->push_back({.name = "mixed_precision", .asked = Always, .question = [](const Answers&) {
                      return DialogQuestion{
                          .text = "In which precision is the forward pass?",
                          .choices = {{"no", "the model's own type, usually fp32"},
                                      {"bf16", "bfloat16 where it is safe"},
                                      {"fp16", "float16 where it is safe, with a scaler"}},
                          .suggestion = "no"};
                    }});
  steps->push_back(
      {.name = "gradient_accumulation_steps", .asked = Always, .question = [](const Answers&) {
         return DialogQuestion{
             .text = "How many backward passes for each step of the optimizer?",
             .note = "Empty: the program's own setting, else 1. The program's setting always wins.",
             .optional = true};
       }});
  steps->push_back({.name = "sharding",
                    .asked = [](const Answers& a) { return !a.Is("num_processes", "1"); },
                    .question =
                        [](const Answers& a) {
                          DialogQuestion question = {
                              .text = "What do the processes shard?",
                              .note = "If the program sets options.sharding, that wins.",
                              .choices = {{"program", "the program's own setting, else nothing"},
                                          {"no_shard", "nothing: each has the whole model"},
                                          {"zero1", "optimizer states"},
                                          {"zero2", "optimizer states and gradients"},
                                          {"zero3", "optimizer states, gradients and parameters"}},
                              .suggestion = "program"};
                          if (a.several() || a.cluster()) {
                            question.choices.push_back({"hybrid", "as zero3, within each machine"});
                          }
                          return question;
                        }});
  steps->push_back(
      {.name = "sharding_units",
       .asked = [](const Answers& a) { return a.shards(); },
       .question =
           [](const Answers&) {
             return DialogQuestion{
                 .text = "Which classes of modules are units, gathered and freed together?",
                 .note =
                     "Comma-separated names, such as Block. Empty: the entries of every ModuleList "
                     "and Sequential.",
                 .optional = true};
           },
       .former =
           [](const Answers& a) {
             const std::string former = a.Former("sharding_units");
             if (!former.empty() || !a.keeps_former()) return former;
             // The form in which `muster config` wrote it before the setting existed.
             const auto it = a.facts.former->env.find(kUnits);
             return it == a.facts.former->env.end() ? "" : it->second.text;
           },
       .read = [](const Answers&, const std::string& answer) { return ReadUnits(answer); }});
}

void AddRunSteps(std::vector<Step>* steps) {
  steps->push_back({.name = "max_restarts", .asked = Always, .question = [](const Answers&) {
                      return DialogQuestion{
                          .text = "How often do all processes restart after one has failed?",
                          .note =
                              "A program that calls load_state_if_present continues from its "
                              "last checkpoint.",
                          .suggestion = "0"};
                    }});
  steps->push_back({.name = "log_dir", .asked = Always, .question = [](const Answers&) {
                      return DialogQuestion{.text = "In which folder are the logs of processes?",
                                            .note = "Empty: all write to the terminal.",
                                            .optional = true};
                    }});
  const auto yes_no = [](const std::string& name, const std::string& text) {
    return Step{.name = name,
                .asked = Always,
                .question =
                    [text](const Answers&) {
                      return DialogQuestion{.text = text, .choices = YesNo(), .suggestion = "no"};
                    },
                .former =
                    [name](const Answers& a) {
                      return a.Former(name).empty() ? "" : YesOrNo(a.FormerBool(name));
                    }};
  };
  steps->push_back(yes_no("tee", "Do they write to the terminal as well?"));
  steps->back().asked = [](const Answers& a) { return !a.Get("log_dir").empty(); };
  steps->push_back(yes_no(
      "debug", "Is every collective checked across processes before it runs? It costs time."));
  steps->push_back(yes_no("more", "Are there other settings to make: name, times, keys?"));
  steps->back().former = [](const Answers&) { return std::string(); };
}

std::vector<Step> AllSteps() {
  std::vector<Step> steps;
  AddMachineSteps(&steps);
  AddProcessSteps(&steps);
  AddTrainingSteps(&steps);
  AddRunSteps(&steps);
  std::set<std::string> known = {"main_process_ip", "main_process_port"};
  for (const Step& step : steps) known.insert(step.name);
  for (const SettingSpec& spec : LaunchSettings()) {
    if (!known.contains(spec.name)) steps.push_back(StepOfSetting(spec));
  }
  return steps;
}

}  // namespace

class ConfigDialog::Impl {
 public:
  explicit Impl(DialogFacts facts) : facts_(std::move(facts)), steps_(AllSteps()), now_(facts_) {
    // The last step, which shows what will be written.
    steps_.push_back({.name = "write",
                      .asked = Always,
                      .question =
                          [this](const Answers& a) {
                            DialogQuestion question = {
                                .text = "Write the file?",
                                .note = absl::StrCat(Printable(a.facts.path), ":"),
                                .choices = {{"yes", "yes"}, {"no", "no, end without a file"}},
                                .suggestion = "yes"};
                            for (const auto& [name, value] : Summary()) {
                              absl::StrAppend(&question.note, "\n  ", name, ": ", value);
                            }
                            return question;
                          },
                      .former = [](const Answers&) { return std::string(); }});
    Next(0);
  }

  State state() const { return state_; }
  const DialogQuestion& question() const { return question_; }
  int number() const { return static_cast<int>(path_.size()) + 1; }

  absl::Status Answer(absl::string_view text) {
    const Step& step = steps_[at_];
    std::string answer(absl::StripAsciiWhitespace(text));
    if (answer.empty()) answer = question_.suggestion;
    if (question_.optional && answer == "-") answer.clear();
    std::string value;
    if (!answer.empty() || !question_.optional) {
      MUSTER_ASSIGN_OR_RETURN(value, Read(step, answer));
    }
    if (step.name == "write" && value == "yes") MUSTER_RETURN_IF_ERROR(Check());
    now_.taken[step.name] = value;
    remembered_[step.name] = value;
    path_.push_back(at_);
    if (value == "leave" || (step.name == "write" && value == "no")) {
      state_ = State::kLeave;
    } else if (step.name == "write") {
      state_ = State::kWrite;
    } else {
      Next(at_ + 1);
    }
    return absl::OkStatus();
  }

  bool Back() {
    if (path_.empty() || state_ != State::kAsking) return false;
    at_ = path_.back();
    path_.pop_back();
    now_.taken.erase(steps_[at_].name);
    Ask();
    return true;
  }

  std::vector<std::pair<std::string, std::string>> Summary() const {
    std::vector<std::pair<std::string, std::string>> summary;
    for (const size_t index : path_) {
      for (auto& entry : Written(steps_[index].name)) summary.push_back(std::move(entry));
    }
    return summary;
  }

  std::string FileText() const {
    std::map<std::string, std::string> settings, env;
    if (now_.keeps_former()) {
      for (const auto& [name, given] : facts_.former->settings) settings[name] = given.text;
      for (const auto& [name, given] : facts_.former->env) env[name] = given.text;
    }
    for (const auto& [name, value] : facts_.given) settings[name] = value;
    // What the answers decide, they decide completely: one machine has no address.
    const bool more = now_.Is("more", "yes");
    bool decided = true;
    for (const Step& step : steps_) {
      if (!decided && !more) continue;
      settings.erase(step.name);
      if (step.name == "more") decided = false;
    }
    for (const char* name : {"main_process_ip", "main_process_port"}) settings.erase(name);
    if (!now_.shards()) {
      for (const SettingSpec& spec : LaunchSettings()) {
        if (spec.of_sharding) settings.erase(spec.name);
      }
    }
    env.erase(kUnits);
    for (const auto& [name, value] : Summary()) settings[name] = value;
    return DefaultConfigText(settings, env);
  }

 private:
  // Returns the keys and values of the file that the answer of a step means.
  std::vector<std::pair<std::string, std::string>> Written(const std::string& name) const {
    const std::string value = now_.Get(name);
    if (value.empty()) return {};
    if (name == "cpu") return {{name, value == "cpu" ? "true" : "false"}};
    if (name == "coordinator") {
      const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(value);
      if (!address.ok()) return {};
      return {{"main_process_ip", address->host},
              {"main_process_port", absl::StrCat(address->port)}};
    }
    const SettingSpec* const spec = FindSetting(name);
    if (spec == nullptr || (name == "sharding" && value == "program")) return {};
    if (spec->type == SettingSpec::Type::kBool) {
      if (value == "default") return {};
      return {{name, value == "yes" ? "true" : "false"}};
    }
    return {{name, value}};
  }

  absl::StatusOr<std::string> Read(const Step& step, const std::string& answer) const {
    if (!question_.choices.empty()) return ReadChoice(answer);
    if (step.read != nullptr) return step.read(now_, answer);
    const SettingSpec* const spec = FindSetting(step.name);
    return spec == nullptr ? answer : ReadByRule(*spec, answer);
  }

  absl::StatusOr<std::string> ReadChoice(const std::string& answer) const {
    const std::vector<DialogChoice>& choices = question_.choices;
    size_t number = 0;
    if (absl::SimpleAtoi(answer, &number) && number >= 1 && number <= choices.size()) {
      return choices[number - 1].value;
    }
    const auto find = [&](absl::string_view value) {
      return std::find_if(choices.begin(), choices.end(),
                          [&](const DialogChoice& choice) { return choice.value == value; });
    };
    auto choice = find(absl::AsciiStrToLower(answer));
    if (choice == choices.end() && find("yes") != choices.end()) {
      if (const auto yes = ParseBoolWord(answer)) choice = find(YesOrNo(*yes));
    }
    if (choice != choices.end()) return choice->value;
    std::vector<std::string> values;
    for (const DialogChoice& known : choices) values.push_back(known.value);
    return Refused(answer, absl::StrCat("write a number from 1 to ", choices.size(), ", or ",
                                        absl::StrJoin(values, ", ")));
  }

  void Next(size_t from) {
    for (at_ = from; !steps_[at_].asked(now_);) ++at_;
    Ask();
  }

  // Suggests the first valid answer of: the previous answer, the value of a flag or the file, and
  // the suggestion of the question itself.
  void Ask() {
    const Step& step = steps_[at_];
    question_ = step.question(now_);
    const auto before = remembered_.find(step.name);
    if (before != remembered_.end() && before->second.empty() && question_.optional) return;
    for (const std::string& suggestion :
         {before == remembered_.end() ? "" : before->second,
          step.former == nullptr ? now_.Former(step.name) : step.former(now_)}) {
      if (suggestion.empty()) continue;
      const absl::StatusOr<std::string> read = Read(step, suggestion);
      if (!read.ok() || read->empty()) continue;
      question_.suggestion = suggestion;
      return;
    }
  }

  // Checks conditions that no single answer shows.
  absl::Status Check() const {
    MUSTER_ASSIGN_OR_RETURN(const Layer layer, ParseConfig(FileText(), facts_.path));
    const bool ids = layer.settings.contains("gpu_ids");
    const absl::StatusOr<LaunchConfig> config = ResolveLaunch(
        {layer}, {.gpus = ids ? facts_.gpus : facts_.usable_gpus, .cores = facts_.cores});
    if (config.ok()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("muster launch would refuse this file: ", config.status().message(),
                     ". Go back and change that"));
  }

  const DialogFacts facts_;
  std::vector<Step> steps_;
  State state_ = State::kAsking;
  size_t at_ = 0;             // the current step
  std::vector<size_t> path_;  // the answered steps
  Answers now_;
  std::map<std::string, std::string> remembered_;  // the latest answer to each step
  DialogQuestion question_;
};

ConfigDialog::ConfigDialog(DialogFacts facts) : impl_(std::make_unique<Impl>(std::move(facts))) {}
ConfigDialog::~ConfigDialog() = default;
ConfigDialog::State ConfigDialog::state() const { return impl_->state(); }
const DialogQuestion& ConfigDialog::question() const { return impl_->question(); }
int ConfigDialog::number() const { return impl_->number(); }
absl::Status ConfigDialog::Answer(absl::string_view answer) { return impl_->Answer(answer); }
bool ConfigDialog::Back() { return impl_->Back(); }
std::vector<std::pair<std::string, std::string>> ConfigDialog::Summary() const {
  return impl_->Summary();
}
std::string ConfigDialog::FileText() const { return impl_->FileText(); }

}  // namespace muster::client
