#include <openssl/sha.h>

#include <cstdint>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/units.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

Json SizeParsingCase(const Json& in) {
  const Json& size = in.at("size");
  const bool hub = in.at("function") == "hub";
  if (size.is_number_integer()) {
    const int64_t bytes = size;
    if (bytes < 0) throw std::invalid_argument("a size cannot be negative: " + size.dump());
    return {{"bytes", bytes}};
  }
  const std::string text = size;
  return {{"bytes", ValueOf(hub ? ParseShardSize(text) : ParseMemorySize(text))}};
}

Json SafetensorsFilesCase(const Json& in) {
  const std::string path = in.at("file");
  const SafetensorsHeader header = ValueOf(ReadSafetensorsHeader(path));
  std::ifstream file(path, std::ios::binary);
  Json tensors = Json::array();
  for (const SafetensorsEntry& entry : header.tensors) {
    std::string bytes(entry.end - entry.begin, '\0');
    file.seekg(static_cast<std::streamoff>(8 + header.header_bytes + entry.begin));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
    tensors.push_back(
        {{"name", entry.name},
         {"dtype", std::string(SafetensorsTypeName(entry.type))},
         {"shape", entry.shape},
         {"begin", entry.begin},
         {"end", entry.end},
         {"sha256", absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest),
                                                             SHA256_DIGEST_LENGTH))}});
  }
  return {{"metadata", header.metadata.has_value() ? Json(*header.metadata) : Json()},
          {"tensors", tensors},
          {"header_bytes", header.header_bytes}};
}

Json SafetensorsWriteCase(const Json& in) {
  std::optional<SafetensorsMetadata> metadata;
  if (!in.at("metadata").is_null()) metadata = in.at("metadata").get<SafetensorsMetadata>();
  std::vector<SafetensorsEntry> entries;
  std::vector<std::string> data;
  for (const Json& tensor : in.at("tensors")) {
    const std::string dtype = tensor.at("dtype");
    const auto type = ParseSafetensorsType(dtype);
    if (!type.has_value()) throw std::invalid_argument("unknown dtype " + dtype);
    entries.push_back({.name = tensor.at("name"), .type = *type, .shape = tensor.at("shape")});
    data.push_back(absl::HexStringToBytes(tensor.at("data_hex").get<std::string>()));
  }
  return {
      {"file_hex", absl::BytesToHexString(ValueOf(EncodeSafetensors(entries, data, metadata)))}};
}

Json ShardCheckpointCase(const Json& in) {
  const bool safe = in.at("safe_serialization");
  const Json& limit = in.at("max_shard_size");
  ShardPlanOptions options;
  options.max_shard_bytes =
      limit.is_string() ? ValueOf(ParseShardSize(limit.get<std::string>())) : limit.get<int64_t>();
  options.keep_first_name_only = safe && in.at("mode") == "save_model";
  if (!safe) {
    options.stem = "pytorch_model";
    options.extension = ".bin";
  }
  std::vector<TensorToShard> tensors;
  for (const Json& tensor : in.at("tensors")) {
    const std::string dtype = tensor.at("dtype");
    const auto type = ParseSafetensorsType(dtype);
    if (!type.has_value()) throw std::invalid_argument("unknown dtype " + dtype);
    tensors.push_back(
        {.name = tensor.at("name"),
         .bytes = ValueOf(SafetensorsBytes(*type, tensor.at("shape"))),
         .storage = tensor.at("storage").is_null() ? "" : tensor.at("storage").dump()});
  }
  const ShardPlan plan = ValueOf(PlanShards(tensors, options));
  Json files = Json::array();
  for (const ShardPlan::File& file : plan.files) files.push_back({file.name, file.tensors});
  return {{"files", files},
          {"weight_map", Json::parse(EncodeShardIndex(plan)).at("weight_map")},
          {"total_size", plan.total_bytes},
          {"index_file", plan.index_name.has_value() ? Json(*plan.index_name) : Json()}};
}

}  // namespace

std::map<std::string, Handler> StorageHandlers() {
  return {{"size_parsing", SizeParsingCase},
          {"safetensors_files", SafetensorsFilesCase},
          {"safetensors_write", SafetensorsWriteCase},
          {"shard_checkpoint", ShardCheckpointCase}};
}

}  // namespace muster::conformance
