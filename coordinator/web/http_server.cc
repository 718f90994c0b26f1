#include "coordinator/web/http_server.h"

#include <httplib.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {

class HttpServer::Impl {
 public:
  ~Impl() {
    // The library forgets a stop() that comes before its loop runs.
    if (!thread.joinable()) return;
    while (!server.is_running() && !ended) std::this_thread::yield();
    server.stop();
    thread.join();
  }
  httplib::Server server;
  std::atomic<bool> ended{false};
  std::thread thread;  // last: joined before the server goes
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(
    const std::string& host, int port,
    const std::vector<std::pair<std::string, Handler>>& handlers) {
  auto impl = std::make_unique<Impl>();
  httplib::Server& server = impl->server;
  server.new_task_queue = [] { return new httplib::ThreadPool(2); };
  server.set_keep_alive_max_count(100);
  server.set_read_timeout(5);
  server.set_write_timeout(5);
  server.set_payload_max_length(1 << 16);
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
      response.set_content(std::move(made.body), made.content_type);
    });
  }
  int bound = port;
  if (port == 0) {
    bound = server.bind_to_any_port(host);
  } else if (!server.bind_to_port(host, port)) {
    bound = -1;
  }
  if (bound <= 0) {
    return absl::AlreadyExistsError(
        absl::StrCat("cannot listen for HTTP on ", host, ":", port,
                     ": is another process there? Use port 0 for a free one"));
  }
  impl->thread = std::thread([raw = impl.get()] {
    raw->server.listen_after_bind();
    raw->ended = true;
  });
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl), bound));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl, int port)
    : impl_(std::move(impl)), port_(port) {}
HttpServer::~HttpServer() = default;

}  // namespace muster::coordinator
