#ifndef MUSTER_WORKER_CHECKPOINT_TRANSFER_H_
#define MUSTER_WORKER_CHECKPOINT_TRANSFER_H_

namespace muster {

// The number of threads that copy, digest and transfer a file: as many as torch uses in this
// process, but at least 2, which keeps a disk busy, and at most 8, because no disk needs more.
int TransferThreads();

// The number of threads that read a file: twice as many, so that the disk stays busy while other
// threads allocate memory and compare digests.
int ReadingThreads();

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TRANSFER_H_
