#ifndef MUSTER_WORKER_JOB_BROKEN_PIPE_H_
#define MUSTER_WORKER_JOB_BROKEN_PIPE_H_

namespace muster {

// From now on a write to a pipe or connection whose reader has gone returns EPIPE instead of ending
// this process without a word (exit code 141 of shells): a peer that vanishes is an error to tell.
// Python does the same at its start. Here it is a handler that does nothing, because an ignored
// SIGPIPE would be inherited by the programs that this process starts, which may rely on it. A
// program that handles or ignores SIGPIPE itself keeps that. Thread-safe.
void SurviveBrokenPipes();

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_BROKEN_PIPE_H_
