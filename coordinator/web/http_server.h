#ifndef MUSTER_COORDINATOR_WEB_HTTP_SERVER_H_
#define MUSTER_COORDINATOR_WEB_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::coordinator {

// A small HTTP server on its own threads for what a browser or a scraper reads. GET and HEAD only,
// one request a connection. Handlers run on those threads and may block for a short while. No
// client can hold it up: a request has at most 64 KiB and 10 s for all of it, connections beyond 64
// are closed at once, and stopping closes open ones. Thread-safe.
class HttpServer {
 public:
  struct Response {
    int status = 200;
    std::string content_type = "text/plain; charset=utf-8";
    std::string body;
  };
  using Handler = std::function<Response()>;

  // Listens on a host and port (0: a free one). Errors: ALREADY_EXISTS the port is taken;
  // PERMISSION_DENIED it is not for this user; INVALID_ARGUMENT anything else that is wrong with
  // the address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& host, int port,
      const std::vector<std::pair<std::string, Handler>>& handlers);
  ~HttpServer();

  int port() const { return port_; }

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl, int port);

  const std::unique_ptr<Impl> impl_;
  const int port_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WEB_HTTP_SERVER_H_
