#ifndef MUSTER_WORKER_CHECKPOINT_TRANSFER_H_
#define MUSTER_WORKER_CHECKPOINT_TRANSFER_H_

namespace muster {

// Threads that copy, digest and transfer a file: as many as torch uses in this process, but at
// least 2, which keeps a disk busy, and at most 8, which no disk needs.
int TransferThreads();

// Threads that read a file: twice as many, so that the disk has something to do while others take
// memory and compare digests.
int ReadingThreads();

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TRANSFER_H_
