#ifndef MUSTER_TESTS_E2E_WORKER_TALK_H_
#define MUSTER_TESTS_E2E_WORKER_TALK_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"

// The channel between these tests and their workers.
namespace muster {

// Returns "" if the variable is not set.
inline std::string Variable(const char* name) {
  const char* const value = getenv(name);
  return value == nullptr ? "" : value;
}

// Prints one line, at once.
inline void Say(const std::string& text) {
  printf("%s\n", text.c_str());
  fflush(stdout);
}

// Ends the process with exit code 1 and the error on stderr unless it is OK.
inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  exit(1);
}

}  // namespace muster

#endif  // MUSTER_TESTS_E2E_WORKER_TALK_H_
