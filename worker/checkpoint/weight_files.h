#ifndef MUSTER_WORKER_CHECKPOINT_WEIGHT_FILES_H_
#define MUSTER_WORKER_CHECKPOINT_WEIGHT_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/byte_source.h"
#include "worker/checkpoint/torch_file.h"

namespace muster {

class AlignedMemory;
class StreamedFile;

// A tensor, and the number of the file that contains it.
struct WeightEntry {
  StoredTensor tensor;
  size_t file = 0;
};

// A model's weights on disk, from any library: safetensors or torch.save, one file or shards with
// an index. Without torch: tools use it too. Reading may be called from several threads.
class WeightFiles {
 public:
  using Entry = WeightEntry;

  // `given`: a file of either format, an index (.json), or a folder; a "~" at its beginning is the
  // user's home. In a folder the first of these that exists is used: model.safetensors,
  // model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json, the only
  // *.index.json, the only *.safetensors. The contents of a file determine its format, not its
  // name.
  //
  // Checks that every file exists, is whole by its header, and holds the tensors that the index
  // places in it. Errors: NOT_FOUND naming what is missing; INVALID_ARGUMENT for weights of
  // TensorFlow, Flax or an unknown library by the metadata "format" of safetensors;
  // INVALID_ARGUMENT and DATA_LOSS as for ReadSafetensorsHeader, ReadTorchFile and ParseShardIndex.
  static absl::StatusOr<WeightFiles> Open(const std::string& given);

  const std::string& path() const { return path_; }
  // The tensors in the order of the files; no name occurs twice.
  const std::vector<Entry>& entries() const { return entries_; }
  // Null if there is no such tensor.
  const Entry* Find(absl::string_view name) const;
  // Returns the path of the file that contains an entry.
  const std::string& FileOf(const Entry& entry) const { return sources_[entry.file]->name(); }

  // The paths of all files.
  std::vector<std::string> Files() const;

  // Divides tensors that hold several, such as those of all experts of a layer. `parts` returns,
  // for the name of a tensor, the names of the matrices of which it consists, one below the other;
  // none: it stays whole. Each part of a tensor [a, b, c] has a * b / (number of parts) rows of c
  // numbers. The parts are entries as if the file had them. INVALID_ARGUMENT names a tensor that
  // does not consist of that many matrices, or that is stored transposed; nothing changes then.
  absl::Status Divide(const std::function<std::vector<std::string>(const std::string&)>& parts);

  // Reads the bytes of the entry's extent, of which there are `entry.tensor.extent_bytes`.
  absl::Status Read(const Entry& entry, char* to) const;

  // For tensors that are read once: by several threads, and past the page cache unless they are
  // cached (see StreamedFile). Errors, with the file and the tensor: those of StreamedFile.
  struct Reading {
    const Entry* entry = nullptr;
    // Where the bytes of its extent go. Null: `take` gets them piece by piece, in whole elements,
    // from several threads at once; `begin` is the offset of a piece in the extent.
    char* to = nullptr;
    std::function<absl::Status(uint64_t begin, absl::string_view piece)> take = nullptr;
  };
  absl::Status ReadAll(const std::vector<Reading>& readings, int threads) const;
  // Reads `bytes` bytes of the entry's extent, from `begin` on, to somewhere in `block`: see
  // StreamedFile::Fetch, also for errors, which name the file and the tensor.
  absl::StatusOr<size_t> Fetch(const Entry& entry, uint64_t begin, size_t bytes, char* block) const;

  // Returns the file that contains an entry; null: there is only Read().
  const StreamedFile* StreamedFileOf(const Entry& entry) const {
    return sources_[entry.file]->streamed();
  }

  // Passes the bytes of the tensor to `sink` in parts, contiguous. Holds a part in memory, or the
  // tensor's extent if it is not contiguous.
  absl::Status Stream(const Entry& entry,
                      absl::FunctionRef<absl::Status(absl::string_view)> sink) const;

  // Returns the number of bytes of the tensor if it were contiguous.
  static uint64_t BytesOf(const Entry& entry);

  // Returns a text that is equal for two names of one tensor in one file (tied weights), otherwise
  // different; empty for a tensor without elements.
  std::string StorageOf(const Entry& entry) const;

 private:
  absl::Status Add(const std::string& file, const std::vector<std::string>* wanted,
                   const std::string& index);
  absl::Status Named(const Entry& entry, const absl::Status& status) const;
  absl::Status ReadPiece(const Reading& reading, uint64_t begin, uint64_t end,
                         AlignedMemory& scratch) const;

  std::string path_;
  std::vector<std::unique_ptr<ByteSource>> sources_;
  std::vector<Entry> entries_;
  std::map<std::string, size_t, std::less<>> places_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WEIGHT_FILES_H_
