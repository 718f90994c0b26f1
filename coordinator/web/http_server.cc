#include "coordinator/web/http_server.h"

#include <fcntl.h>
#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file_identity.h"
#include "base/log.h"
#include "base/mutex.h"

namespace muster::coordinator {
namespace {

constexpr size_t kThreads = 8;
// Connections open at once, with those that wait for a thread. Each costs a descriptor that agents
// may need.
constexpr int kMaxConnections = 64;
// A page is asked for and taken within this time, however slowly the bytes come.
constexpr absl::Duration kPatience = absl::Seconds(10);
// The patience while others wait for a thread. Dozens of connections that send nothing must not
// keep a health check, after which a supervisor restarts this coordinator, waiting for minutes.
constexpr absl::Duration kPatienceInACrowd = absl::Milliseconds(250);
constexpr absl::Duration kLookAround = absl::Milliseconds(50);
constexpr size_t kMaxRequestBytes = 64 << 10;
constexpr absl::Duration kRetryListen = absl::Milliseconds(500);

// One request and its answer. Unlike the library's own stream it has one deadline for all of it and
// a bound on what it reads: timeouts for each byte let a client that sends one a second hold a
// thread forever.
class Connection final : public httplib::Stream {
 public:
  // `open`: how many connections are served or wait for a thread. Outlives this.
  Connection(int fd, const std::atomic<int>* open) : fd_(fd), open_(open) {}

  bool is_readable() const override { return Ready(POLLIN); }
  bool is_writable() const override { return Ready(POLLOUT); }
  ssize_t read(char* out, size_t size) override {
    if (at_ == end_) {
      if (left_ == 0 || !Ready(POLLIN)) return -1;
      const ssize_t got = recv(fd_, buffer_, std::min(sizeof(buffer_), left_), 0);
      if (got <= 0) return got;
      left_ -= static_cast<size_t>(got);
      at_ = 0;
      end_ = static_cast<size_t>(got);
    }
    const size_t count = std::min(size, end_ - at_);
    std::memcpy(out, buffer_ + at_, count);
    at_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* data, size_t size) override {
    for (size_t sent = 0; sent < size;) {
      if (!Ready(POLLOUT)) return -1;
      const ssize_t count = send(fd_, data + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && errno != EAGAIN && errno != EINTR) return -1;
      if (count > 0) sent += static_cast<size_t>(count);
    }
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return fd_; }

 private:
  bool Ready(short events) const {
    while (true) {
      const absl::Duration passed = Clock::Real().Now() - begun_;
      pollfd one{.fd = fd_, .events = events, .revents = 0};
      const int count = poll(&one, 1, static_cast<int>(absl::ToInt64Milliseconds(kLookAround)));
      // A client that is ready to receive its answer is not hurried, because preparing the answer
      // may have taken long.
      const bool hurry = *open_ > static_cast<int>(kThreads) && (events == POLLIN || count == 0);
      if (passed >= (hurry ? kPatienceInACrowd : kPatience)) return false;
      if (count > 0) return true;
      if (count < 0 && errno != EINTR) return false;
    }
  }

  const int fd_;
  const std::atomic<int>* const open_;
  const absl::Time begun_ = Clock::Real().Now();
  size_t left_ = kMaxRequestBytes;
  char buffer_[4096];
  size_t at_ = 0, end_ = 0;
};

// Set while the listening thread runs a connection's task to close it at once: the task owns the
// socket.
thread_local bool refusing = false;

class Pool final : public httplib::TaskQueue {
 public:
  Pool(std::atomic<int>* open, std::function<void()> on_shutdown)
      : open_(*open), on_shutdown_(std::move(on_shutdown)) {}
  void enqueue(std::function<void()> task) override {
    if (open_.fetch_add(1) >= kMaxConnections) {
      refusing = true;
      task();
      refusing = false;
      --open_;
      return;
    }
    threads_.enqueue([this, task = std::move(task)] {
      task();
      --open_;
    });
  }
  // Called when the listening thread accepts no more: its socket was stopped, or accept() has
  // failed.
  void shutdown() override {
    on_shutdown_();
    threads_.shutdown();
  }

 private:
  std::atomic<int>& open_;
  const std::function<void()> on_shutdown_;
  httplib::ThreadPool threads_{kThreads};
};

class BoundedServer final : public httplib::Server {
 public:
  BoundedServer() {
    new_task_queue = [this] { return new Pool(&open_, [this] { ReleaseListening(); }); };
  }
  ~BoundedServer() override {
    MutexLock lock(&mu_);
    // The library has closed it if accept() failed before it was stopped.
    if (stopped_ != INVALID_SOCKET && IsSameSocket(stopped_, listening_)) close(stopped_);
    if (listening_ >= 0) close(listening_);
  }
  // Call after each bind, before the loop. The library closes its socket when accept() fails and
  // keeps the number, which another file may get at once: StopListening() needs one of its own.
  // False: there is no descriptor for it, and nothing is bound.
  bool KeepListening() {
    MutexLock lock(&mu_);
    listening_ = fcntl(svr_sock_, F_DUPFD_CLOEXEC, 0);
    if (listening_ < 0) close(svr_sock_.exchange(INVALID_SOCKET));
    return listening_ >= 0;
  }
  // Makes accept() fail from now on, also in a loop that has not begun: the library's stop()
  // forgets what comes before that.
  void StopListening() {
    MutexLock lock(&mu_);
    if (listening_ < 0) return;
    shutdown(listening_, SHUT_RDWR);
    // Ends the loop, which otherwise tries again as long as there is no descriptor for accept().
    stopped_ = svr_sock_.exchange(INVALID_SOCKET);
  }
  // Ends what is being served, so that stopping waits for no client.
  void HangUp() {
    MutexLock lock(&mu_);
    ended_ = true;
    for (const int fd : serving_) shutdown(fd, SHUT_RDWR);
  }

 private:
  bool process_and_close_socket(socket_t fd) override {
    bool serve = !refusing;
    if (serve) {
      MutexLock lock(&mu_);
      serve = !ended_;
      if (serve) serving_.insert(fd);
    }
    if (serve) {
      Connection connection(fd, &open_);
      bool closed = false;
      process_request(connection, /*close_connection=*/true, closed, nullptr);
      MutexLock lock(&mu_);
      serving_.erase(fd);
    }
    shutdown(fd, SHUT_RDWR);
    close(fd);
    return serve;
  }

  static bool IsSameSocket(int a, int b) {
    struct stat first, second;
    return fstat(a, &first) == 0 && fstat(b, &second) == 0 &&
           FileIdentityOf(first) == FileIdentityOf(second);
  }
  // Called once the loop has ended. After a stop, the destructor does it.
  void ReleaseListening() {
    MutexLock lock(&mu_);
    if (listening_ < 0 || stopped_ != INVALID_SOCKET) return;
    close(listening_);
    listening_ = -1;
  }

  // How many connections are served or wait for a thread.
  std::atomic<int> open_{0};
  Mutex mu_;
  int listening_ ABSL_GUARDED_BY(mu_) = -1;
  // The library's descriptor of the listening socket when it was stopped.
  socket_t stopped_ ABSL_GUARDED_BY(mu_) = INVALID_SOCKET;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::set<int> serving_ ABSL_GUARDED_BY(mu_);
};

// `why`: an errno; 0 if the library left none.
absl::Status CannotListen(const std::string& host, int port, int why) {
  const std::string what = absl::StrCat("cannot listen for HTTP on ", host, ":", port, ": ");
  if (why == EADDRINUSE || why == 0) {
    return absl::AlreadyExistsError(absl::StrCat(
        what, "another process may be using it: stop that process, or use port 0 for a free port"));
  }
  if (why == EACCES || why == EPERM) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, "this user may not use the port: use a port from 1024 on"));
  }
  if (why == EMFILE || why == ENFILE) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, "too many files are open; raise the limit of open files"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, "is ", host, " an address of this machine? ", strerror(why)));
}

}  // namespace

class HttpServer::Impl {
 public:
  ~Impl() {
    if (!thread.joinable()) return;
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    stop_.SignalAll();
    server.StopListening();
    server.HangUp();
    thread.join();
  }
  // Serves until it is stopped. The library closes its socket at errors of accept() that pass, such
  // as a full table of files.
  void Serve(const std::string& host, int port) {
    for (bool bound = true; !bound || !server.listen_after_bind();) {
      MutexLock lock(&mu_);
      if (stopping_) break;
      MUSTER_LOG(Warning) << "no connection for HTTP on " << host << ":" << port
                          << " can be accepted now, possibly because too many files are open: "
                             "trying again";
      stop_.WaitWithTimeout(&mu_, kRetryListen);
      if (stopping_) break;
      bound = server.bind_to_port(host, port) && server.KeepListening();
    }
  }
  BoundedServer server;
  std::thread thread;  // joined before the server goes

 private:
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const std::string& host, int port,
    const std::vector<std::pair<std::string, Handler>>& handlers) {
  auto impl = std::make_unique<Impl>();
  httplib::Server& server = impl->server;
  server.set_payload_max_length(kMaxRequestBytes);
  // The library's default sets SO_REUSEPORT, with which a second server would silently share the
  // port.
  server.set_socket_options([](socket_t fd) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  });
  for (const auto& [path, handler] : handlers) {
    server.Get(path, [handler = handler](const httplib::Request&, httplib::Response& response) {
      Response made = handler();
      response.status = made.status;
      response.set_content(made.body, made.content_type);
    });
  }
  errno = 0;
  int bound = port;
  if (port == 0) {
    bound = server.bind_to_any_port(host);
  } else if (!server.bind_to_port(host, port)) {
    bound = -1;
  }
  if (bound <= 0 || !impl->server.KeepListening()) return CannotListen(host, port, errno);
  impl->thread = std::thread([raw = impl.get(), host, bound] { raw->Serve(host, bound); });
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl), bound));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl, int port)
    : impl_(std::move(impl)), port_(port) {}
HttpServer::~HttpServer() = default;

}  // namespace muster::coordinator
