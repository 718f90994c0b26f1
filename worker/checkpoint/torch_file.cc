#include "worker/checkpoint/torch_file.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/pickled_tensors.h"
#include "worker/checkpoint/zip_directory.h"

namespace muster {
namespace {

constexpr absl::string_view kZipMark = "PK\x03\x04";
// A pickle of the number 0x1950a86a20f9469cfc6c, with which files from before PyTorch 1.6 begin.
constexpr absl::string_view kLegacyMark =
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
constexpr absl::string_view kPickle = "/data.pkl";

absl::Status Bad(const ByteSource& file, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(file.name(), ": ", why));
}

// Whether it begins with eight bytes of length, the upper half of which is 0, and JSON; by chance
// such a beginning can look like one of the other formats.
bool IsSafetensors(absl::string_view beginning) {
  return beginning.size() > 8 && beginning[8] == '{' &&
         beginning.substr(4, 4) == absl::string_view("\0\0\0\0", 4);
}

bool IsPickle(absl::string_view beginning) {
  return !IsSafetensors(beginning) && beginning.size() >= 3 && beginning[0] == '\x80' &&
         beginning[1] >= 2 && beginning[1] <= 5 && beginning[2] != '\0';
}

bool IsContiguous(const PickledTensor& tensor) {
  uint64_t expected = 1;
  for (size_t i = tensor.shape.size(); i > 0; --i) {
    if (tensor.shape[i - 1] == 0) return true;
    if (tensor.shape[i - 1] != 1 && tensor.strides[i - 1] != expected) return false;
    expected *= tensor.shape[i - 1];
  }
  return true;
}

absl::Status CheckBeginning(const ByteSource& file) {
  std::string beginning(std::min<uint64_t>(file.size(), 16), '\0');
  MUSTER_RETURN_IF_ERROR(file.Read(0, beginning.data(), beginning.size()));
  if (absl::StartsWith(beginning, kLegacyMark)) {
    return Bad(file,
               "is in torch.save's legacy format, which is not read (PyTorch before 1.6, or "
               "_use_new_zipfile_serialization=False): load it in Python and save it again");
  }
  if (IsPickle(beginning)) {
    return Bad(file,
               "is a plain Python pickle, not a file of torch.save: pickles are not executed");
  }
  if (!absl::StartsWith(beginning, kZipMark)) {
    return Bad(file, "is not a file of torch.save (it is not a zip archive)");
  }
  return absl::OkStatus();
}

// The members of torch.save's archive, by their names below its root folder.
class Archive {
 public:
  static absl::StatusOr<Archive> Open(const ByteSource& file) {
    Archive archive;
    MUSTER_ASSIGN_OR_RETURN(archive.members_, ReadZipDirectory(file));
    std::string root;
    int pickles = 0;
    for (const ZipMember& member : archive.members_) {
      const size_t slash = member.name.find('/');
      if (slash == std::string::npos || absl::string_view(member.name).substr(slash) != kPickle) {
        continue;
      }
      root = member.name.substr(0, slash);
      ++pickles;
    }
    if (pickles != 1) {
      return Bad(file, "is a zip archive, but not of torch.save: it does not hold one data.pkl");
    }
    for (size_t i = 0; i < archive.members_.size(); ++i) {
      absl::string_view name = archive.members_[i].name;
      if (absl::ConsumePrefix(&name, root) && absl::ConsumePrefix(&name, "/")) {
        archive.by_name_[std::string(name)] = i;
      }
    }
    return archive;
  }

  // Returns null if there is none.
  const ZipMember* Find(absl::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &members_[found->second];
  }
  const std::vector<ZipMember>& members() const { return members_; }

 private:
  std::vector<ZipMember> members_;
  absl::flat_hash_map<std::string, size_t> by_name_;
};

// Checks that the archive holds data, as torch.save writes them.
absl::Status CheckArchive(const ByteSource& file, const Archive& archive) {
  if (archive.Find("constants.pkl") != nullptr) {
    return Bad(file,
               "is a TorchScript archive, which holds code: load it with torch::jit::load, or save "
               "its state_dict");
  }
  for (const ZipMember& member : archive.members()) {
    if (!member.compressed) continue;
    return Bad(file, absl::StrCat("member \"", Printable(member.name),
                                  "\" of the archive is compressed, as torch.save never does: load "
                                  "the file in Python and save it again"));
  }
  if (const ZipMember* const order = archive.Find("byteorder")) {
    std::string text(std::min<uint64_t>(order->bytes, 16), '\0');
    MUSTER_RETURN_IF_ERROR(file.Read(order->begin, text.data(), text.size()));
    if (text != "little") {
      return Bad(file, absl::StrCat("its byte order is \"", Printable(text),
                                    "\"; only little-endian files are read"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StoredTensor> Locate(const ByteSource& file, const Archive& archive,
                                    const PickledTensor& tensor) {
  const ZipMember* const storage = archive.Find(absl::StrCat("data/", tensor.storage));
  const uint64_t there = storage == nullptr ? 0 : storage->bytes;
  if (there != tensor.storage_bytes) {
    return absl::DataLossError(
        absl::StrCat(file.name(), ": tensor \"", Printable(tensor.name), "\": its storage ",
                     Printable(tensor.storage), " has ", there, " bytes in the archive, but ",
                     tensor.storage_bytes, " by its description: the file is damaged"));
  }
  const uint64_t element_bytes = SafetensorsTypeBits(tensor.type) / 8;
  return StoredTensor{
      .name = tensor.name,
      .type = tensor.type,
      .shape = tensor.shape,
      .strides = IsContiguous(tensor) ? std::vector<uint64_t>() : tensor.strides,
      .begin = tensor.extent_bytes == 0 ? 0 : storage->begin + tensor.offset * element_bytes,
      .extent_bytes = tensor.extent_bytes};
}

}  // namespace

bool LooksLikeTorchFile(absl::string_view beginning) {
  return (absl::StartsWith(beginning, kZipMark) && !IsSafetensors(beginning)) ||
         IsPickle(beginning);
}

absl::StatusOr<std::vector<StoredTensor>> ReadTorchFile(const ByteSource& file) {
  MUSTER_RETURN_IF_ERROR(CheckBeginning(file));
  MUSTER_ASSIGN_OR_RETURN(const Archive archive, Archive::Open(file));
  MUSTER_RETURN_IF_ERROR(CheckArchive(file, archive));
  const ZipMember& pickle = *archive.Find("data.pkl");
  if (pickle.bytes > kMaxPickleBytes) {
    return Bad(file, absl::StrCat("its data.pkl has ", pickle.bytes, " bytes, more than the ",
                                  kMaxPickleBytes, " allowed"));
  }
  std::string program(pickle.bytes, '\0');
  MUSTER_RETURN_IF_ERROR(file.Read(pickle.begin, program.data(), program.size()));
  MUSTER_ASSIGN_OR_RETURN(const std::vector<PickledTensor> pickled,
                          ParsePickledTensors(program, absl::StrCat(file.name(), ": data.pkl")));
  std::vector<StoredTensor> tensors;
  tensors.reserve(pickled.size());
  for (const PickledTensor& tensor : pickled) {
    MUSTER_ASSIGN_OR_RETURN(StoredTensor stored, Locate(file, archive, tensor));
    tensors.push_back(std::move(stored));
  }
  return tensors;
}

}  // namespace muster
