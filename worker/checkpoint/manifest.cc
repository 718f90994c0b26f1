#include "worker/checkpoint/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/json.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "muster-checkpoint";

Json EncodeBlocks(const BlockDigests& blocks) {
  Json digests = Json::array();
  for (const uint64_t digest : blocks.xxh3) digests.push_back(absl::StrFormat("%016x", digest));
  return {{"bytes", blocks.block_bytes}, {"xxh3", std::move(digests)}};
}

// Returns false if `json` does not describe the blocks of a file of `bytes` bytes. Throws as Json
// does.
bool DecodeBlocks(const Json& json, uint64_t bytes, BlockDigests* blocks) {
  json.at("bytes").get_to(blocks->block_bytes);
  if (blocks->block_bytes == 0 || blocks->block_bytes % 4096 != 0) return false;
  for (const Json& entry : json.at("xxh3")) {
    const std::string& text = entry.get_ref<const std::string&>();
    uint64_t digest = 0;
    if (text.size() != 16 || !std::all_of(text.begin(), text.end(), absl::ascii_isxdigit) ||
        !absl::SimpleHexAtoi(text, &digest)) {
      return false;
    }
    blocks->xxh3.push_back(digest);
  }
  return blocks->xxh3.size() ==
         bytes / blocks->block_bytes + (bytes % blocks->block_bytes == 0 ? 0 : 1);
}

// Whether a number is not an integer; manifests hold only integers.
bool HasFractions(const Json& json) {
  if (json.is_number_float()) return true;
  if (!json.is_structured()) return false;
  return std::any_of(json.begin(), json.end(), HasFractions);
}

// Returns the digest of the compact form with sorted keys, without "digest" itself.
std::string SelfDigest(Json json) {
  json.erase("digest");
  return DigestBytes(json.dump()).xxh3;
}

}  // namespace

const ManifestFile* Manifest::Find(absl::string_view name) const {
  for (const ManifestFile& file : files) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

bool IsPlainName(absl::string_view name) {
  return !name.empty() && name != "." && name != ".." && name != kManifestName &&
         name.size() <= 255 && name.find('/') == absl::string_view::npos &&
         name.find('\0') == absl::string_view::npos && IsValidUtf8(name);
}

absl::StatusOr<std::string> EncodeManifest(Manifest manifest) {
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const ManifestFile& a, const ManifestFile& b) { return a.name < b.name; });
  Json files = Json::array();
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    if (!IsPlainName(file.name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", Printable(file.name), "\" is not a valid name for a checkpoint's file"));
    }
    if (i > 0 && manifest.files[i - 1].name == file.name) {
      return absl::InvalidArgumentError(absl::StrCat("file ", file.name, " was written by rank ",
                                                     manifest.files[i - 1].rank, " and by rank ",
                                                     file.rank, "; every file has one writer"));
    }
    files.push_back({{"name", file.name},
                     {"rank", file.rank},
                     {"bytes", file.digest.bytes},
                     {"xxh3", file.digest.xxh3}});
    if (!file.blocks.empty()) files.back()["blocks"] = EncodeBlocks(file.blocks);
  }
  Json json = {{"format", kFormat},
               {"version", kManifestVersion},
               {"created", manifest.created},
               {"world_size", manifest.info.world_size},
               {"iteration", manifest.info.iteration},
               {"step", manifest.info.step},
               {"micro_step", manifest.info.micro_step},
               {"epoch", manifest.info.epoch},
               {"cursor", manifest.info.cursor},
               {"files", std::move(files)}};
  for (const ManifestNode& node : manifest.nodes) {
    if (!IsValidUtf8(node.host)) {
      return absl::InvalidArgumentError("the host name of a node is not UTF-8");
    }
    json["nodes"].push_back({{"host", node.host}, {"ranks", node.ranks}});
  }
  json["digest"] = SelfDigest(json);
  return json.dump(1) + "\n";
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text, absl::string_view source) {
  const absl::StatusOr<Json> parsed = ParseJson(text, source);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  const Json& json = *parsed;
  if (!json.is_object() || json.value("format", Json()) != kFormat) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": is not the manifest of a checkpoint"));
  }
  if (json.value("digest", Json()) != SelfDigest(json)) {
    return absl::DataLossError(absl::StrCat(source, ": is damaged: its own digest does not fit"));
  }
  const Json version = json.value("version", Json());
  if (version.is_number_integer() && version.get<int64_t>() > kManifestVersion) {
    return absl::UnimplementedError(
        absl::StrCat(source, ": has format version ", version.get<int64_t>(),
                     ", but this program reads ", kManifestVersion, "; use a newer Muster"));
  }
  // The conversion of a fraction to an integer is undefined if it does not fit.
  if (!version.is_number_integer() || HasFractions(json)) {
    return absl::DataLossError(absl::StrCat(source, ": has a number that is not an integer"));
  }
  try {
    Manifest manifest;
    json.at("created").get_to(manifest.created);
    json.at("world_size").get_to(manifest.info.world_size);
    json.at("iteration").get_to(manifest.info.iteration);
    json.at("step").get_to(manifest.info.step);
    json.at("micro_step").get_to(manifest.info.micro_step);
    json.at("epoch").get_to(manifest.info.epoch);
    json.at("cursor").get_to(manifest.info.cursor);
    absl::flat_hash_set<std::string> names;
    for (const Json& entry : json.at("files")) {
      ManifestFile file;
      entry.at("name").get_to(file.name);
      entry.at("rank").get_to(file.rank);
      entry.at("bytes").get_to(file.digest.bytes);
      entry.at("xxh3").get_to(file.digest.xxh3);
      if (const auto blocks = entry.find("blocks");
          blocks != entry.end() && !DecodeBlocks(*blocks, file.digest.bytes, &file.blocks)) {
        return absl::DataLossError(absl::StrCat(source, ": the blocks of \"", Printable(file.name),
                                                "\" do not fit its size"));
      }
      if (!IsPlainName(file.name) || !names.insert(file.name).second) {
        return absl::DataLossError(absl::StrCat(source, ": has a bad or repeated file name \"",
                                                Printable(file.name), "\""));
      }
      manifest.files.push_back(std::move(file));
    }
    for (const Json& entry : json.value("nodes", Json::array())) {
      ManifestNode node;
      entry.at("host").get_to(node.host);
      entry.at("ranks").get_to(node.ranks);
      manifest.nodes.push_back(std::move(node));
    }
    return manifest;
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrCat(source, ": ", error.what()));
  }
}

}  // namespace muster
