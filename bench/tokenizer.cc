// How fast a tokenizer.json encodes and decodes the documents of a file, on one thread, and how
// long it takes to load. bench/peers/tokenizer.py is the same with the tokenizers library, and
// makes the files. Prints one JSON line for each measurement.
#include "muster/tokenizer.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/file.h"
#include "bench/load_average.h"

namespace {

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

// Returns the median of `rounds` calls.
template <typename Act>
double Median(int64_t rounds, Act act) {
  std::vector<double> walls;
  for (int64_t i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    act();
    walls.push_back(Seconds(start));
  }
  std::sort(walls.begin(), walls.end());
  return walls[walls.size() / 2];
}

void Print(const std::string& name, const char* what, double value, const char* unit) {
  std::printf(
      "{\"bench\": \"tokenizer\", \"tokenizer\": \"%s\", \"what\": \"%s\", \"%s\": %.4g, \"load\": "
      "%.2f}\n",
      name.c_str(), what, unit, value, muster::bench::LoadAverage());
}

void Exit(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

void Measure(const std::string& file, const std::vector<std::string>& documents, int64_t rounds) {
  const std::string name = muster::BaseName(file);
  const double load = Median(std::min<int64_t>(rounds, 3), [&] {
    const auto loaded = muster::Tokenizer::FromFile(file);
    if (!loaded.ok()) Exit(loaded.status());
  });
  Print(name, "load", load * 1e3, "ms");
  const auto tokenizer = muster::Tokenizer::FromFile(file);
  if (!tokenizer.ok()) Exit(tokenizer.status());
  double bytes = 0;
  std::vector<std::vector<int64_t>> ids;
  for (const std::string& document : documents) {
    const auto encoded = tokenizer->EncodeIds(document);
    if (!encoded.ok()) Exit(encoded.status());
    ids.push_back(*encoded);
    bytes += static_cast<double>(document.size());
  }
  size_t seen = 0;
  const double encode = Median(rounds, [&] {
    for (const std::string& document : documents) seen += tokenizer->Encode(document)->size();
  });
  Print(name, "encode", bytes / encode / 1e6, "MB_per_s");
  const double alone = Median(rounds, [&] {
    for (const std::string& document : documents) seen += tokenizer->EncodeIds(document)->size();
  });
  Print(name, "encode ids alone", bytes / alone / 1e6, "MB_per_s");
  const double decode = Median(rounds, [&] {
    for (const std::vector<int64_t>& list : ids) seen += tokenizer->Decode(list)->size();
  });
  Print(name, "decode", bytes / decode / 1e6, "MB_per_s");
  if (seen == 0) std::fprintf(stderr, "no tokens\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  std::string text;
  int64_t rounds = 5;
  CLI::App app("Megabytes per second of tokenizers, on one thread.");
  app.add_option("tokenizers", files, "tokenizer.json files")->required();
  app.add_option("--text", text, "documents, separated by zero bytes")->required();
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const auto contents = muster::ReadFile(text);
  if (!contents.ok()) Exit(contents.status());
  const std::vector<std::string> documents = absl::StrSplit(*contents, '\0');
  for (const std::string& file : files) Measure(file, documents, rounds);
  return 0;
}
