#ifndef MUSTER_AGENT_FAKE_CONTROL_GROUPS_H_
#define MUSTER_AGENT_FAKE_CONTROL_GROUPS_H_

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "agent/control_group.h"
#include "base/file.h"

namespace muster::agent {

// The kernel's side of a tree of control groups, in an ordinary folder: a new group has the
// kernel's files, and a controller's files if its parent enables it. Processes, limits and their
// consequences are what a test writes to the files.
class FakeControlGroups {
 public:
  static ControlGroupCalls Calls() { return {.mkdir = Mkdir, .rmdir = Rmdir}; }

  // Makes a group with these controllers, as the root of a tree.
  static void MakeRoot(const std::string& folder, const std::string& controllers) {
    ::mkdir(folder.c_str(), 0755);
    Fill(folder, controllers);
  }
  static void Put(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  static std::string Get(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

 private:
  static void Fill(const std::string& folder, const std::string& controllers) {
    std::map<std::string, std::string> files = {{"cgroup.type", "domain\n"},
                                                {"cgroup.procs", ""},
                                                {"cgroup.kill", ""},
                                                {"cgroup.events", "populated 0\nfrozen 0\n"},
                                                {"cgroup.controllers", controllers},
                                                {"cgroup.subtree_control", ""}};
    if (absl::StrContains(controllers, "memory")) {
      files["memory.max"] = "max\n";
      files["memory.swap.max"] = "max\n";
      files["memory.oom.group"] = "0\n";
      files["memory.peak"] = "0\n";
      files["memory.events"] = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n";
    }
    if (absl::StrContains(controllers, "cpu")) {
      files["cpu.max"] = "max 100000\n";
      files["cpu.weight"] = "100\n";
    }
    for (const auto& [name, text] : files) Put(JoinPath(folder, name), text);
  }
  static int Mkdir(const char* path, mode_t mode) {
    if (::mkdir(path, mode) != 0) return -1;
    const std::string enabled = Get(JoinPath(ParentPath(path), "cgroup.subtree_control"));
    Fill(path, absl::StrReplaceAll(enabled, {{"+", ""}}));
    return 0;
  }
  static int Rmdir(const char* path) {
    if (!PathExists(path)) {
      errno = ENOENT;
      return -1;
    }
    if (absl::StrContains(Get(JoinPath(path, "cgroup.events")), "populated 1")) {
      errno = EBUSY;
      return -1;
    }
    return RemoveTree(path).ok() ? 0 : -1;
  }
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_CONTROL_GROUPS_H_
