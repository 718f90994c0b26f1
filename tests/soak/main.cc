// Thirty minutes of everything that a coordinator and its agents may meet, at once. See
// docs/failpoints.md.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/time/time.h"
#include "tests/soak/soak.h"

int main(int argc, char** argv) {
  muster::soak::SoakOptions options;
  double minutes = 30;
  int64_t memory_mib = 1024;
  CLI::App app(
      "Runs jobs under attack, with kills, pauses and full disks, and checks that nothing is "
      "lost.");
  app.add_option("--minutes", minutes, "how long; the job under way then is finished")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "of the first job; each further one has the next")
      ->capture_default_str();
  app.add_option("--memory_mib", memory_mib,
                 "what the coordinator may hold; about four times as much under AddressSanitizer")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  options.duration = absl::Minutes(minutes);
  options.memory_bytes = memory_mib << 20;
  options.report = [](const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  };
  const std::vector<std::string> wrong = muster::soak::Soak(options);
  for (const std::string& line : wrong) std::printf("%s\n", line.c_str());
  std::printf("%s\n", wrong.empty() ? "nothing was wrong" : "FAILED");
  return wrong.empty() ? 0 : 1;
}
