#include "worker/checkpoint/seal.h"

#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "worker/checkpoint/clean_path.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxBytes = 1 << 20;
constexpr size_t kFirstFields = 16;  // fields of WriteSeal, without `held_back` and `pinned`

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); });
}

// Must match coordinator/checkpoint/chain.h.
std::string FilesSha256(const std::map<std::string, FileDigest>& files) {
  std::string text;
  for (const auto& [name, digest] : files) {
    absl::StrAppend(&text, name, "\t", digest.bytes, "\t", digest.xxh3, "\n");
  }
  return absl::BytesToHexString(Sha256(text));
}

}  // namespace

bool HasPin(const std::string& dir) {
  struct stat info;
  if (lstat(JoinPath(dir, kPinName).c_str(), &info) != 0) {
    return errno != ENOENT && errno != ENOTDIR;
  }
  // Checkpoints of earlier versions may have a file of the program's own by this name.
  return info.st_size == 0;
}

// Names are escaped, as in SealText: JSON can hold no other bytes than text.
std::string EncodeSeal(const RegisteredCheckpoint& record) {
  const Json json = {{"format", kSealFormat},
                     {"version", 1},
                     {"job", absl::CHexEscape(record.job)},
                     {"id", record.id},
                     {"path", absl::CHexEscape(record.path)},
                     {"iteration", record.iteration},
                     {"step", record.step},
                     {"ranks", record.ranks},
                     {"plan", absl::StrCat(absl::Hex(record.plan, absl::kZeroPad16))},
                     {"created", record.created_us},
                     {"files", record.files},
                     {"bytes", record.bytes},
                     {"files_sha256", record.files_sha256},
                     {"previous", record.previous_sha256},
                     {"sha256", record.sha256},
                     {"signature", record.signature},
                     {"held_back", !record.promoted},
                     {"pinned", record.pinned}};
  return json.dump(1) + "\n";
}

absl::Status WriteSeal(const std::string& dir, const RegisteredCheckpoint& record) {
  return WriteSealText(dir, EncodeSeal(record));
}

absl::Status WriteSealText(const std::string& dir, absl::string_view text) {
  const absl::Status in_place = FinishSealing(dir, text);
  if (in_place.ok()) return in_place;
  MUSTER_RETURN_IF_ERROR(WriteFileAtomically(JoinPath(dir, kSealName), text));
  return ForgetSealing(dir);
}

absl::Status SealFiles(const std::string& dir, const std::vector<ManifestFile>& files,
                       RegisteredCheckpoint* record) {
  std::map<std::string, FileDigest> digests;
  for (const ManifestFile& file : files) digests[file.name] = file.digest;
  MUSTER_ASSIGN_OR_RETURN(digests[kManifestName], DigestFile(JoinPath(dir, kManifestName)));
  record->files = static_cast<int64_t>(digests.size());
  record->bytes = 0;
  for (const auto& [name, digest] : digests) record->bytes += digest.bytes;
  record->files_sha256 = FilesSha256(digests);
  record->sha256 = absl::BytesToHexString(Sha256(SealText(*record)));
  return absl::OkStatus();
}

size_t RoomForSeal(const std::string& job, const std::string& path) {
  constexpr size_t kOtherFields = 2048;  // numbers, digests, a signature, and their names
  return 2 * (absl::CHexEscape(job).size() + absl::CHexEscape(path).size()) + kOtherFields;
}

absl::StatusOr<RegisteredCheckpoint> ReadSeal(const std::string& dir) {
  std::string path = JoinPath(dir, kSealName);
  const auto bad = [&path](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(path, " is not a record of a checkpoint: ", why));
  };
  absl::StatusOr<std::string> text = ReadRecordFile(path, kMaxBytes);
  if (absl::IsNotFound(text.status())) {
    MUSTER_RETURN_IF_ERROR(CheckLink(dir));
    // If the disk is read-only, the record cannot be renamed to seal.json.
    MUSTER_ASSIGN_OR_RETURN(const Sealing sealing, ReadSealing(dir));
    if (sealing.state == Sealing::State::kSealed) {
      path = JoinPath(dir, kSealingName);
      text = ReadRecordFile(path, kMaxBytes);
    }
  }
  MUSTER_RETURN_IF_ERROR(text.status());
  const absl::StatusOr<Json> parsed = ParseJson(*text, path);
  if (!parsed.ok()) return absl::DataLossError(parsed.status().message());
  const Json& json = *parsed;
  RegisteredCheckpoint record;
  record.state = RegisteredCheckpoint::State::kSealed;
  try {
    if (json.at("format") != kSealFormat) return bad("its format is another");
    if (json.at("version") != 1) {
      return absl::UnimplementedError(
          absl::StrCat(path, ": version ", json.at("version").dump(),
                       " is of a newer Muster; this one knows version 1"));
    }
    std::string plan;
    // Accept only the escaping that we write, so that a change is noticed.
    const auto unescape = [&json](const char* field, std::string* name) {
      const std::string text = json.at(field).get<std::string>();
      return absl::CUnescape(text, name) && absl::CHexEscape(*name) == text;
    };
    if (!unescape("job", &record.job) || !unescape("path", &record.path)) {
      return bad("a name is escaped in an unknown way");
    }
    json.at("id").get_to(record.id);
    json.at("iteration").get_to(record.iteration);
    json.at("step").get_to(record.step);
    json.at("ranks").get_to(record.ranks);
    json.at("plan").get_to(plan);
    json.at("created").get_to(record.created_us);
    json.at("files").get_to(record.files);
    json.at("bytes").get_to(record.bytes);
    json.at("files_sha256").get_to(record.files_sha256);
    json.at("previous").get_to(record.previous_sha256);
    json.at("sha256").get_to(record.sha256);
    json.at("signature").get_to(record.signature);
    // The first writers of this version knew neither field, the next ones no `pinned`. A field
    // whose name was changed must not count as a missing one, so the number of fields is checked.
    const size_t later = json.count("held_back") + json.count("pinned");
    if (later < 2 && json.size() != kFirstFields + later) return bad("a field has another name");
    record.promoted = !json.contains("held_back") || !json.at("held_back").get<bool>();
    if (json.contains("pinned")) json.at("pinned").get_to(record.pinned);
    record.pinned = record.pinned || HasPin(dir);
    if (plan.size() != 16 || !IsHex(plan) || !absl::SimpleHexAtoi(plan, &record.plan)) {
      return bad("plan");
    }
    if (record.sha256.size() != 64) return bad("sha256");
    for (const std::string* digest :
         {&record.files_sha256, &record.previous_sha256, &record.sha256, &record.signature}) {
      if (!IsHex(*digest) || digest->size() % 2 != 0) return bad("a digest is not hexadecimal");
    }
  } catch (const Json::exception& error) {
    return bad(error.what());
  }
  return record;
}

absl::Status CheckSeal(const std::string& dir, const Manifest& manifest,
                       const RegisteredCheckpoint& seal, const VerifyingKey* key,
                       const std::string& key_name) {
  const std::string path = JoinPath(dir, kSealName);
  const std::string digest = Sha256(SealText(seal));
  if (absl::BytesToHexString(digest) != seal.sha256) {
    return absl::DataLossError(
        absl::StrCat(path, " was changed: its facts have the hash ", absl::BytesToHexString(digest),
                     ", but it says ", seal.sha256, "; use a checkpoint whose record is whole"));
  }
  std::map<std::string, FileDigest> files;
  for (const ManifestFile& file : manifest.files) files[file.name] = file.digest;
  const std::string without_manifest = FilesSha256(files);
  MUSTER_ASSIGN_OR_RETURN(files[kManifestName], DigestFile(JoinPath(dir, kManifestName)));
  // Records of older workers do not include the manifest itself.
  if (seal.files_sha256 != FilesSha256(files) &&
      (seal.files_sha256 != without_manifest || seal.step != manifest.info.step ||
       seal.iteration != manifest.info.iteration)) {
    return absl::DataLossError(
        absl::StrCat(dir, " is not the checkpoint that its ", kSealName,
                     " is about: the manifest was changed, or one of the two was replaced; use "
                     "another checkpoint"));
  }
  if (key == nullptr) return absl::OkStatus();
  if (seal.signature.empty()) {
    return absl::DataLossError(absl::StrCat(
        dir,
        " is not signed: the coordinator that sealed it had no key (--checkpoint_key), or, "
        "without one, rank 0 (MUSTER_CHECKPOINT_KEY)"));
  }
  if (!key->Verifies(digest, absl::HexStringToBytes(seal.signature))) {
    return absl::DataLossError(absl::StrCat(dir, " is not signed by the key of ", key_name,
                                            ": another coordinator sealed it, or its ", kSealName,
                                            " is forged"));
  }
  // An older checkpoint, with its record, may have been put in the place of a newer one. Copies
  // under a name that users choose are their own.
  const std::string name = BaseName(AbsolutePath(dir));  // of "." too
  if (IsNumberedName(name) && name != BaseName(seal.path)) {
    return absl::DataLossError(absl::StrCat(
        dir, " has the name of another checkpoint: its contents were sealed and signed as ",
        seal.path, " (step ", seal.step, "); restore the one that belongs there, or move this one ",
        "to its own name or to one without a number"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> PinnedIn(const CheckpointFolder& folder) {
  std::vector<std::string> pinned;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
  for (const int64_t number : numbers) {
    const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(folder.PathOf(number));
    // A record that cannot be read may say that it is pinned.
    if (HasPin(folder.PathOf(number)) ||
        (seal.ok() ? seal->pinned : !absl::IsNotFound(seal.status()))) {
      pinned.push_back(folder.PathOf(number));
    }
  }
  return pinned;
}

std::string SealText(const RegisteredCheckpoint& record) {
  return absl::StrCat(
      "muster checkpoint 1\njob ", absl::CHexEscape(record.job), "\nid ", record.id, "\npath ",
      absl::CHexEscape(record.path), "\niteration ", record.iteration, "\nstep ", record.step,
      "\nranks ", record.ranks, "\nplan ", absl::StrCat(absl::Hex(record.plan, absl::kZeroPad16)),
      "\ncreated ", record.created_us, "\nfiles ", record.files, "\nbytes ", record.bytes,
      "\nfiles_sha256 ", record.files_sha256, "\nprevious ", record.previous_sha256, "\n");
}

}  // namespace muster
