#include "worker/checkpoint/agreement.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/text.h"
#include "c10/util/Exception.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxMessage = 16 << 10;  // limit for a message that is not UTF-8

std::string Encode(const absl::Status& status, const std::vector<ManifestFile>& files = {}) {
  Json json = {{"code", static_cast<int>(status.code())}, {"files", Json::array()}};
  const std::string message(status.message());
  // Paths may contain any bytes.
  json["message"] = IsValidUtf8(message) ? message : Printable(message, kMaxMessage);
  for (const ManifestFile& file : files) {
    json["files"].push_back({file.name, file.rank, file.digest.bytes, file.digest.xxh3,
                             file.blocks.block_bytes, file.blocks.xxh3});
  }
  // If a rank failed here, the others would wait in the exchange. A name that is not UTF-8 becomes
  // one that is not in the manifest, and is refused there.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::Status Decode(const std::string& bytes, std::vector<ManifestFile>* files = nullptr) {
  const Json json = Json::parse(bytes);
  if (files != nullptr) {
    for (const Json& file : json["files"]) {
      files->push_back({.name = file[0],
                        .rank = file[1],
                        .digest = {.bytes = file[2], .xxh3 = file[3]},
                        .blocks = {.block_bytes = file[4], .xxh3 = file[5]}});
    }
  }
  return absl::Status(static_cast<absl::StatusCode>(json["code"].get<int>()),
                      json["message"].get<std::string>());
}

}  // namespace

absl::Status GuardRank(absl::FunctionRef<absl::Status()> work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    return absl::InternalError(FirstLine(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::InternalError(FirstLine(error.what()));
  }
}

absl::Status AgreeOnFiles(Comm& comm, const absl::Status& mine,
                          const std::vector<ManifestFile>& my_files,
                          std::vector<ManifestFile>* files) {
  const std::vector<std::string> all = comm.AllGatherBytes(Encode(mine, my_files));
  absl::Status first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::Status status = Decode(all[rank], files);
    if (status.ok() || !first.ok()) continue;
    first = all.size() == 1
                ? status
                : absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
  }
  return first;
}

absl::Status StatusOfMain(Comm& comm, const absl::Status& mine) {
  return Decode(comm.BroadcastBytes(comm.rank() == 0 ? Encode(mine) : "", 0));
}

}  // namespace muster
