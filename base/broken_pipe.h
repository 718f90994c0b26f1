#ifndef MUSTER_BASE_BROKEN_PIPE_H_
#define MUSTER_BASE_BROKEN_PIPE_H_

namespace muster {

// From now on a write to a pipe or connection without a reader returns EPIPE instead of ending this
// process silently (exit code 141 in shells): a vanished peer is an error to report. Python does
// the same at its start. Here it is a handler that does nothing, because an ignored SIGPIPE would
// be inherited by the programs that this process starts, which may rely on it. A program that
// handles or ignores SIGPIPE itself keeps that. Thread-safe.
void SurviveBrokenPipes();

}  // namespace muster

#endif  // MUSTER_BASE_BROKEN_PIPE_H_
