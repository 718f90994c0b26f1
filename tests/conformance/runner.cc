// Reads cases (tests/testdata/README.md) on standard input, a JSON object a line, and writes an
// answer a line. Files that a case names are relative to the working directory. Exits 0.
#include <iostream>
#include <string>

#include "tests/conformance/handlers.h"

int main() {
  std::ios::sync_with_stdio(false);
  for (std::string line; std::getline(std::cin, line);) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::cout << muster::conformance::AnswerLine(line) << "\n" << std::flush;
  }
  return 0;
}
